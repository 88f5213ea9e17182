# Everything is created inside this folder: .venv from the lock files, if needed .venv-oldest-torch and, where uv is
# missing, .tools with uv.

# The first of these that runs and is in range creates .venv. 3.13 comes late because flytekit 1.16 declares 3.10 to 3.12.
PYTHON ?= python3.12 python3.11 python3.10 python3.13 python3
UV_VERSION ?= 0.13.8
IMAGE ?= flyte-ddp-training:latest

# pyflyte looks up a default image at start-up and knows none for Python 3.13; ours is the better default anyway.
FLYTE_INTERNAL_IMAGE ?= $(IMAGE)
export FLYTE_INTERNAL_IMAGE

# Prints a command as you would type it and runs it with .venv (or the second argument) first on PATH: pyflyte called by a
# relative path would pack itself into the code archive.
typed = printf '%s\n' '+ $(subst ','\'',$(1))'; PATH="$(CURDIR)/$(or $(2),.venv)/bin:$$PATH" $(1)

.DEFAULT_GOAL := help
.PHONY: help run example test test-all test-processors docs lint test-oldest-torch bench bench-trainers bench-models gpu-check faults image dry-run dry-run2 package register smoke smoke2
.PHONY: lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

run: .venv/run.stamp ## Train; more arguments: make run ARGS="--hp '{\"epochs\": 1}'"
	@$(call typed,pyflyte run workflows/mnist.py pytorch_training_wf$(if $(ARGS), $(ARGS)))

example: .venv/$(if $(filter finetune_%,$(NAME)),dev,run).stamp ## Train one of autoencoder, charlm, contrastive, finetune_images, finetune_text, own_loop, resnet, segmentation, stream, tabular: make example NAME=tabular
	@$(call typed,PYTHONPATH=. pyflyte run examples/$(example)/workflow.py $(example)_wf$(if $(ARGS), $(ARGS)))

examples = $(sort $(patsubst examples/%/workflow.py,%,$(wildcard examples/*/workflow.py)))
example = $(or $(filter $(NAME),$(examples)),$(error NAME must be one of $(examples), got '$(NAME)': make example NAME=tabular))

test: .venv/dev.stamp ## Run the tests that a change needs, in minutes; a part: make test ARGS=tests/engine
	@$(call typed,pytest -m "not slow"$(if $(ARGS), $(ARGS)))

test-all: .venv/dev.stamp ## Run all tests, with commands, pods and examples as their users run them
	@$(call typed,pytest$(if $(ARGS), $(ARGS)))

# Files with such tests alone, because importing all of tests/ takes as long as they do
kernels = -m "kernels and not slow" $(shell grep -rl --include='*.py' 'mark\.kernels' tests)
is_avx2 = grep -qs avx2 /proc/cpuinfo && ! grep -qs avx512 /proc/cpuinfo && echo "this processor has AVX2 itself: see the other tests"
test-processors: .venv/dev.stamp ## Run the tests of bits and thresholds as on a processor with AVX2, and as on one without
	@$(is_avx2) || { $(call typed,ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 pytest $(kernels)$(if $(ARGS), $(ARGS))); }
	@$(call typed,ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 pytest $(kernels)$(if $(ARGS), $(ARGS)))

docs: .venv/dev.stamp ## Build the site of these pages in build/site, on Python 3.11 or later; to see it: python -m http.server --directory build/site
	@rm -rf build/site build/doctrees
	@$(call typed,sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees . build/site)

lint: .venv/dev.stamp ## Check style and types with ruff and mypy
	@$(call typed,ruff check)
	@$(call typed,ruff format --check)
	@$(call typed,mypy)

test-oldest-torch: .venv-oldest-torch/stamp ## Run the tests of the engine with the oldest torch that is supported
	@$(call typed,pytest tests/compat tests/engine tests/launch$(if $(ARGS), $(ARGS)),.venv-oldest-torch)

bench: .venv/dev.stamp ## Run the benchmarks, in about half an hour; once each: make bench ARGS="--runs 1"
	@$(call typed,python -m benchmarks$(if $(ARGS), $(ARGS)))

bench-trainers: .venv/dev.stamp ## Compare with Lightning, Accelerate and transformers; once: make bench-trainers ARGS="--runs 1"
	@$(call typed,python -m benchmarks.against_trainers$(if $(ARGS), $(ARGS)))

bench-models: .venv/dev.stamp ## Kill and resume trainings of other libraries' models, and compare the bits
	@$(call typed,python -m benchmarks.architectures$(if $(ARGS), $(ARGS)))

gpu-check: .venv/run.stamp ## Check our claims about GPUs on this machine's: make gpu-check ARGS="--data FOLDER"
	@$(call typed,python -m benchmarks.gpu_check$(if $(ARGS), $(ARGS)))

faults: .venv/dev.stamp ## Break training on purpose and show the outcome, in about fifteen minutes
	@$(call typed,python -m benchmarks.faults$(if $(ARGS), $(ARGS)))

image: ## Build the image that the pods run: make image IMAGE=registry/name:tag
	@$(call typed,docker build --tag $(IMAGE) --build-arg FLYTE_INTERNAL_IMAGE=$(IMAGE) $(if $(ARGS),$(ARGS) ).)

dry-run: .venv/run.stamp ## Show, without a cluster, what would be registered
	@$(call typed,python -m scripts.dry_run $(IMAGE))

dry-run2: .venv/run.stamp ## Show, without a cluster, what flyte2/ would deploy on a cluster of Flyte 2
	@$(call typed,python -m scripts.dry_run2 $(IMAGE))

package: .venv/run.stamp ## Write what would be registered to flyte-package.tgz, for flytectl
	@$(call typed,pyflyte --pkgs workflows package $(images) --output flyte-package.tgz --force)
	@.venv/bin/python -c "import flyte_ddp; print('flyte-package.tgz has flyte-ddp-training', flyte_ddp.__version__)"

register: .venv/run.stamp ## Register: make register IMAGE=registry/name:tag CLUSTER_CONFIG=~/.flyte/config.yaml
	@$(call typed,python -m scripts.register $(cluster) $(images)$(if $(ARGS), $(ARGS)))

smoke: .venv/run.stamp ## Register, and run every workflow with small inputs: make smoke IMAGE=registry/name:tag CLUSTER_CONFIG=…
	@$(call typed,python -m scripts.smoke --config $(cluster) $(images)$(if $(ARGS), $(ARGS)))

smoke2: .venv/run.stamp ## Run what flyte2/ has with small inputs on a cluster of Flyte 2: make smoke2 IMAGE=registry/name:tag CLUSTER_CONFIG=…
	@$(call typed,python -m scripts.smoke2 --config $(cluster) $(images)$(if $(ARGS), $(ARGS)))

cluster = $(or $(CLUSTER_CONFIG),$(error CLUSTER_CONFIG is not set: the file that names your cluster))
images = --image trainer=$(IMAGE)

lock: .venv/pyvenv.cfg ## Compile the lock files from pyproject.toml; newer versions: make lock ARGS=--upgrade
	@$(find_uv); $(call compile,requirements.txt $(features) $(ARGS))
	@$(find_uv); $(call compile,requirements-dev.txt --extra dev --constraints requirements.txt $(ARGS))
	@$(find_uv); $(call compile,requirements-oldest-torch.txt --extra oldest-torch $(ARGS))

clean: ## Remove what make and the tools have created here
	rm -rf .venv .venv-oldest-torch .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# The packages of every feature: `make run` shows all of them, and what an image lacks would be missed only on the cluster.
features = --extra export --extra flyte2 --extra lightning --extra multinode --extra parquet \
	--extra sharding --extra tensorboard

# One lock for Python 3.10 to 3.13 on every platform; it names no index, so each site's own settings apply.
compile = "$$uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes \
	--custom-compile-command 'make lock' pyproject.toml --output-file $(1)

# Puts the path of a uv that works into $uv: the one on PATH, else our own.
own_uv = .tools/uv-$(UV_VERSION)
find_uv = uv=uv; if ! uv --version >/dev/null 2>&1; then \
	uv=$(own_uv)/bin/uv; \
	if ! test -x $$uv; then \
		echo "+ installing uv $(UV_VERSION) into $(own_uv)"; \
		rm -rf $(own_uv) && .venv/bin/python -m venv $(own_uv) && \
		$(own_uv)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION) || exit 1; \
	fi; \
	fi

sync = $(find_uv); echo "+ uv pip sync $(1)"; "$$uv" pip sync --quiet $(compiled) --python $(@D)/bin/python --require-hashes $(1)

# Measured on Linux; on macOS there are no CUDA libraries, which are most of it.
installing = Installing PyTorch, Flyte and what they need into .venv, once: it downloads 3.3 GB and takes 6.4 GB of disk, \
	most of it for GPUs, and about three minutes, in which nothing more is printed.

# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each start of Python would compile torch and flytekit anew.
# Compiling everything takes half a minute, though, which the tests with an old torch do not make up for.
compiled = --compile-bytecode
.venv-oldest-torch/stamp: compiled =

.venv/run.stamp: requirements.txt .venv/pyvenv.cfg
	@ls -d .venv/lib/*/site-packages/torch >/dev/null 2>&1 || echo "$(installing)"
	@$(call sync,requirements.txt)
	@touch $@

.venv/dev.stamp: requirements-dev.txt .venv/run.stamp
	@$(call sync,requirements-dev.txt)
	@touch $@

.venv-oldest-torch/stamp: requirements-oldest-torch.txt .venv-oldest-torch/pyvenv.cfg
	@$(call sync,requirements-oldest-torch.txt)
	@touch $@

.venv-oldest-torch/pyvenv.cfg: .venv/pyvenv.cfg
	.venv/bin/python -m venv --clear --without-pip $(@D)

# A .venv whose interpreter is gone is recreated.
ifeq ($(realpath .venv/bin/python),)
.PHONY: .venv/pyvenv.cfg
endif
.venv/pyvenv.cfg:
	@for python in $(PYTHON); do \
		if "$$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then \
			echo "+ $$python -m venv .venv"; \
			rm -rf .venv; \
			"$$python" -m venv --without-pip .venv; \
			exit; \
		fi; \
	done; \
	echo "No Python from 3.10 to 3.13 with venv among: $(PYTHON)." >&2; \
	echo "Install one (on Debian and Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
