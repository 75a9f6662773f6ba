"""What kvx is measured with: a deterministic simulation, mutants of its rules, golden wire vectors."""
