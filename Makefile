# make apply [VLLM_REF=v0.33.0] [DEST=dir]    fetch the pin, apply the stack, verify it
# make test                                   the CPU test suite; makes what it needs
# make lint | verify | status | unapply       the commands of apply.py on DEST
# make build [VLLM_REF=...]                   build and install vLLM from the patched source (needs CUDA, hours)
# make wheel [PLATFORM=aarch64]               the official wheel with the patched Python files laid in, into dist/
# make bundle [KIND=engine]                   parts and a script for a GPU host without network, into dist/bundle-KIND
# make bench                                  the benchmarks that this machine can run, then plots of their results (matplotlib)
# make drift NEW=v0.32.0 [HTML=page.html]     how far the stack is from that release; changes nothing
# make rebase NEW=v0.32.0                     carry the stack to it; see docs/rebase.md
PYTHON ?= python3
VLLM_REF ?=
DEST ?=
NEW ?=
HTML ?=

ref = $(if $(VLLM_REF),--ref '$(VLLM_REF)')
new = $(if $(NEW),'$(NEW)',$(error give NEW=the release, for example: make $@ NEW=v0.32.0))
dest = $(if $(DEST),'$(DEST)',$(error give DEST=the tree))

.PHONY: help apply verify status unapply lint bases drift rebase test build wheel bundle bench
help:
	@sed -n 's/^# //p' Makefile

apply:
	$(PYTHON) apply.py apply --verify $(ref) $(if $(DEST),--dest '$(DEST)')

verify status unapply:
	$(PYTHON) apply.py $@ $(dest)

lint bases:
	$(PYTHON) apply.py $@

drift:
	$(PYTHON) apply.py drift --ref $(new) $(if $(HTML),--html '$(HTML)')

rebase:
	$(PYTHON) apply.py rebase --to $(new)

test:
	$(PYTHON) tests/run.py

build:
	$(PYTHON) scripts/build.py $(ref) $(if $(DEST),--dest '$(DEST)')

wheel:
	$(PYTHON) apply.py wheel $(ref) $(if $(PLATFORM),--platform '$(PLATFORM)')

bundle:
	$(PYTHON) apply.py bundle $(ref) --$(or $(KIND),layer)

gpu_benches = bench/bench_query_split.py bench/bench_ckv_gather.py bench/bench_ckv_prefetch.py bench/bench_gather_choice.py
several_gpus = bench/bench_several_gpus.py
bench:
	$(PYTHON) bench/bench_apply.py
	@if command -v nvidia-smi >/dev/null && $(PYTHON) -c 'import vllm' 2>/dev/null; then \
	  benches="$(gpu_benches)"; \
	  if [ "$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then benches="$$benches $(several_gpus)"; \
	  else echo "not run, needs at least 2 GPUs: $(several_gpus)"; fi; \
	  for b in $$benches; do $(PYTHON) $$b || exit 1; done; \
	else echo "not run, no GPU or no vllm to import here: $(gpu_benches) $(several_gpus)"; fi
	@$(PYTHON) bench/plot.py || { [ $$? -eq 2 ] && echo "the plots were not drawn; what was measured is in bench/out"; }
