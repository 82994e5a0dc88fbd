# Two commands: `make train` and `make test`. Both make .venv first. PYTHON=python3.12 make train picks another Python.
PYTHON ?= python3
REQUIREMENTS := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements-gpu.txt || echo requirements.txt)

train: .venv/installed
	.venv/bin/python train.py --env letters --difficulty 6

test: .venv/installed
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/python -m pytest -q tests

# torch first and alone: with it in place, nothing that follows pulls another build of it.
.venv/installed: requirements.txt requirements-gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "picoswarm needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== requirements.txt)"
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	@touch .venv/installed

clean:
	rm -rf .venv

.PHONY: train test clean
