"""The scenarios. Ids are stable; `hazards` names entries of the catalogue of known faults.

`p` is the producer and `d` the consumer unless a title says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvx_conformance.catalogue.aborts import ABORTS
from kvx_conformance.catalogue.cuts import CUTS
from kvx_conformance.catalogue.deaths import DEATHS
from kvx_conformance.catalogue.leases import LEASES
from kvx_conformance.catalogue.moves import MOVES
from kvx_conformance.catalogue.refusals import REFUSALS
from kvx_conformance.scenarios import Scenario

SCENARIOS: Mapping[str, Scenario] = {
    scenario.id: scenario for scenario in (*MOVES, *ABORTS, *CUTS, *DEATHS, *LEASES, *REFUSALS)
}
