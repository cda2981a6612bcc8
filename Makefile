# make demo       train a DeepSeek-V2-shaped model on CPU (DATA=rows.jsonl TOKENIZER=DIR for your own text)
# make test       the tests that CI runs
# make test-slow  the rest, minutes more
# make fuzz       the kernels under sanitizers on random inputs (SECONDS=60 SEED=0, SANITIZERS=thread)
# make lint       ruff, pyright, clang-format, codespell
# make bench-host the plugin's own cost inside one training process
# make bench-planner  the planner beside other packers, each figure with its bar
# make bench-corpus   hbp prepare beside the bare tokenizer, millions of rows, loading micro-batches
# make pareto     docs/planner_*.svg: what mixing costs a pipeline, and how other methods do
# Each target makes .venv when it is missing. PYTHON= names the interpreter to make it from.

SHELL := /bin/bash
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow fuzz lint format bench-host bench-planner bench-corpus pareto clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/bin/python:
	@python=$$(scripts/find_python.sh "$(PYTHON)") && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml setup.py $(wildcard csrc/*)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet --editable '.[train,test]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(RUN)/python -m examples.demo $(if $(DATA),--data "$(DATA)") $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)")

test: $(STAMP)
	$(RUN)/python -m pytest -m "not slow"

test-slow: $(STAMP)
	$(RUN)/python -m pytest -m slow

SANITIZERS := address,undefined
FUZZ := build/fuzz$(if $(filter thread,$(SANITIZERS)),-thread)
FUZZ_FLAGS := -std=c++17 -O1 -g1 -Wall -Wextra -Werror -pthread \
	-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all
FUZZ_SOURCES := $(filter-out csrc/bindings.cpp,$(wildcard csrc/*.cpp)) $(wildcard tests/fuzz/*.cpp)

fuzz: $(FUZZ)/fuzz_packing
	$< --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(if $(RUNS),--runs $(RUNS))

$(FUZZ)/fuzz_packing: $(FUZZ_SOURCES:%.cpp=$(FUZZ)/%.o)
	$(CXX) $(FUZZ_FLAGS) $^ -o $@

$(FUZZ)/%.o: %.cpp $(wildcard csrc/*.h tests/fuzz/*.h)
	@mkdir -p $(@D)
	$(CXX) $(FUZZ_FLAGS) -Icsrc -c $< -o $@

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/clang-format --dry-run --Werror csrc/* tests/fuzz/*
	$(RUN)/codespell
	$(RUN)/pyright --pythonpath $(RUN)/python

format: $(STAMP)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i csrc/* tests/fuzz/*

bench-host: $(STAMP)
	$(RUN)/python -m benchmarks.host_overhead

bench-planner: $(STAMP)
	@$(RUN)/python -c 'import lightbinpack, binpacking' 2>/dev/null || $(RUN)/python -m pip install --quiet --editable '.[bench]'
	@$(RUN)/python -m benchmarks.planner_bench

bench-corpus: $(STAMP)
	$(RUN)/python -m benchmarks.corpus_speed
	$(RUN)/python -m benchmarks.corpus_loader
	$(RUN)/python -m benchmarks.corpus_scale

pareto: $(STAMP)
	@$(RUN)/python -c 'import matplotlib' 2>/dev/null || $(RUN)/python -m pip install --quiet --editable '.[bench]'
	@$(RUN)/python -m benchmarks.planner_pareto

clean:
	rm -rf $(VENV) build *.egg-info megatron_hbp/*.so demo_output .pytest_cache .ruff_cache .hypothesis
