"""KvxConnector with a rule taken out: with MUTANT=NAME every server has it, and the engine tests have to fail."""

from __future__ import annotations

from typing import Any

from kvx_vllm.connector import KvxConnector


class ReportsEarly(KvxConnector):
    """Tells vLLM that a load is over when it has just begun."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.finished_recving |= set(self._worker._loads.values())
        self._worker._loads.clear()
        return results


class FreesOnAbort(KvxConnector):
    """Gives the blocks of a request back as soon as its client has left."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        load = self._scheduler._loads.get(request.request_id)
        answer = super().request_finished_all_groups(request, block_ids)
        if load is not None and load.awaited:
            self._scheduler._pins.drop(load.transfer.id)
        return answer
