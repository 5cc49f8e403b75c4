"""Proof of coverage: the paper's fifteen architectures, and the model zoos that people use.

Each zoo module says `names()` and `build(name)` → `Case`, a model with inputs; `check` explains a case and says what it
found; `sweep` does so for many, each in a worker process; `report` writes the tables. Nothing here knows the engine beyond
its public verbs. Needs `pip install 'dynamiclrp[cli,zoo]'`.
"""
