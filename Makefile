# make demo: set everything up and run the main job on the CPU. make test: the tests. make sweeps: a twelfth of the slow
# ones. All start from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
# CUDA kernels take minutes to compile: by default only if there is a GPU and nvcc. on: always; auto: if there is nvcc.
DIPTYCH_CUDA ?= $(if $(wildcard /dev/nvidia[0-9]*),auto,off)
SECONDS_EACH ?= 20
BIN := $(VENV)/bin
SOURCES := $(shell find core_cuda jax_frontend/csrc -name '*.[ch]*' -o -name '*.cu*' -o -name 'CMakeLists.txt') CMakeLists.txt

ASAN := build/asan
PAIRS := build/pairs
INTEGRATIONS := build/integrations
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: demo test sweeps asan asan-build fuzz fuzz-asan simulate variants lab-pairs integrations versions \
  versions-torch versions-jax wheels wheels-test lint docs stub bench setup clean

demo: setup
	@echo "== one recipe in both frameworks, on the CPU; the report will be runs/demo"
	$(BIN)/diptych compare --recipe fp8-current --steps 160 --out runs/demo

# Each worker begins with half of the tests, in order, so that neighbouring files reuse compiled code in one process.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal -q

test: setup
	$(PYTEST)

# A twelfth of the slow tests, chosen by the commit's hash, or by PART=0 to 11. The twelve parts cover all slow tests.
PART ?= $(shell git rev-parse HEAD | $(PYTHON) -c 'print(int(input()[:8], 16) % 12)')

# SECONDS_LEFT=N: no slow test begins after N seconds, and the number of those left out is printed.
SLOW = --part $(PART) $(if $(SECONDS_LEFT),--seconds $(SECONDS_LEFT))

sweeps: setup
	@echo "part $(PART) of the slow tests, of 0 to 11"
	$(PYTEST) -m slow $(SLOW)

# CPU tests of ops that read maps and groups, under AddressSanitizer and UBSan. Both libraries are preloaded, since the
# sanitizer otherwise does not find the functions that it wraps.
ASAN_PYTHON = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(ASAN)/bin/python

asan-build: setup
	$(BIN)/python -m venv $(ASAN)
	$(BIN)/python $(SITE) >"$$($(ASAN)/bin/python $(SITE))/environment.pth"
	DIPTYCH_CUDA=off DIPTYCH_JAX=off DIPTYCH_SANITIZE=address,undefined PATH="$(CURDIR)/$(BIN):$$PATH" \
	  $(ASAN)/bin/python -m pip install -q --no-build-isolation --no-deps --config-settings build-dir=build/asan-objects .

asan: asan-build
	$(ASAN_PYTHON) -m pytest -n 2 -q tests/core/permute/test_permute.py tests/core/permute/test_permute_misuse.py \
	  tests/core/grouped/test_grouped_gemm.py tests/core/grouped/test_grouped_bias_grad.py

# Random calls, files and uses of modules (tests/fuzz). SEED=N repeats a run, SECONDS_EACH=N sets the time of each target,
# and TARGETS selects some of "raw verbs files modules".
FUZZ = PYTHONPATH=tests
FUZZ_OPTIONS = --seconds $(SECONDS_EACH) $(if $(SEED),--seed $(SEED)) $(if $(TARGETS),--target $(TARGETS))

fuzz: setup
	$(FUZZ) $(BIN)/python -m fuzz $(FUZZ_OPTIONS)

fuzz-asan: asan-build
	$(FUZZ) $(ASAN_PYTHON) -m fuzz --target raw verbs $(FUZZ_OPTIONS)

# Run the source of CUDA kernels on the CPU; needs CUDA's headers.
simulate: setup
	$(PYTEST) -m simulated tests/core

# Build cores with invented formats, which must work, and cores with a small fault, which the tests must detect.
variants: setup
	$(PYTEST) -m "variants and not slow" tests/architecture

# The lab on models that transformers has in torch and in Flax (tests/pairs), in an environment of its own, which reads
# the other packages from the project's. Of the slow tests the commit's part runs too. The tests compile much that runs
# once, so XLA does not optimize it.
lab-pairs: $(PAIRS)/.installed
	JAX_PLATFORMS=cpu XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" \
	  $(PAIRS)/bin/python -m pytest -n 2 --dist worksteal -q -m "slow or not slow" $(SLOW) tests/pairs

$(PAIRS)/.installed: constraints-pairs.txt | setup
	$(BIN)/python -m venv --clear $(PAIRS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" >"$$($(PAIRS)/bin/python $(SITE))/environment.pth"
	$(PAIRS)/bin/python -m pip install -q --no-deps -r constraints-pairs.txt
	touch $@

# Trainers of other projects on converted models (tests/integrations), in an environment of their own, likewise.
integrations: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest -n 2 --dist loadfile -q $(if $(SECONDS_LEFT),--seconds $(SECONDS_LEFT)) \
	  tests/integrations

$(INTEGRATIONS)/.installed: constraints-integrations.txt | setup
	$(BIN)/python -m venv --clear $(INTEGRATIONS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" \
	  >"$$($(INTEGRATIONS)/bin/python $(SITE))/environment.pth"
	$(INTEGRATIONS)/bin/python -m pip install -q --no-deps -r constraints-integrations.txt
	touch $@

# Wheels for other machines, into dist, and a try of each where no compiler is. DIPTYCH_WHEEL_CUDA=off leaves GPUs out.
DIPTYCH_WHEEL_CUDA ?= auto

wheels:
	$(PYTHON) core_cuda/wheels/build.py --cuda $(DIPTYCH_WHEEL_CUDA)

wheels-test: wheels
	$(PYTHON) tests/wheels/bare.py dist

# The oldest torch and the newest JAX that are supported, each in an environment of its own, which runs a part of the
# tests that takes minutes: private API of the framework, tracing, states, layers. NEWER is the Python of the newest JAX.
# The newest torch is tried by hand: `make versions TORCH=2.14.1`.
TORCH ?= 2.11.0
JAX ?= 0.12.*
NEWER ?= $(shell for p in python3.12 python3.13 "$$(pyenv root 2>&1)"/versions/3.1[23].*/bin/python; do \
  "$$p" -c "" 2>/dev/null && echo "$$p" && break; done)
VERSIONS := build/versions
OLD_TORCH := $(VERSIONS)/torch-$(TORCH)
NEW_JAX := $(VERSIONS)/jax

versions: versions-torch versions-jax

versions-torch: $(OLD_TORCH)/.installed
	$(OLD_TORCH)/bin/python -m pytest -n 2 --dist worksteal -q $(addprefix tests/torch_frontend/,private graph state)

versions-jax: $(NEW_JAX)/.installed
	JAX_PLATFORMS=cpu $(NEW_JAX)/bin/python -m pytest -n 2 --dist worksteal -q \
	  $(addprefix tests/jax_frontend/,primitives jaxprs state layers)

# All other packages are the project's environment's. pip would need nothing of torch's CUDA libraries on a machine without
# a GPU, but `import torch` does.
$(OLD_TORCH)/.installed: | setup
	$(BIN)/python -m venv --clear $(OLD_TORCH)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" >"$$($(OLD_TORCH)/bin/python $(SITE))/environment.pth"
	$(OLD_TORCH)/bin/python -m pip install -q torch==$(TORCH)
	touch $@

$(NEW_JAX)/.installed: pyproject.toml
	$(NEWER) -m venv --clear $(NEW_JAX)
	DIPTYCH_CUDA=off $(NEW_JAX)/bin/python -m pip install -q . "jax==$(JAX)" "jaxlib==$(JAX)" optax \
	  pytest pytest-xdist hypothesis allpairspy
	touch $@

lint: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, into build/site. A broken link, a page outside of the navigation or an unknown name of the API ends it; with
# --quiet mkdocs would not count its warnings.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site: build/site/index.html"

# Write the stub of the core's Python module from the signatures of the built module.
stub: setup
	$(BIN)/python core_cuda/bindings/stub.py >build/_core.pyi
	mv build/_core.pyi core_cuda/diptych/core/_core.pyi
	$(BIN)/ruff format core_cuda/diptych/core/_core.pyi

bench: setup
	$(BIN)/python -m benchmarks --device cpu --only cpu --out build/benchmarks

# New Python files need `touch pyproject.toml` first: an editable install only finds files that existed when it was made.
setup: $(VENV)/.installed

# Runs a command, and says every ten seconds how far it is: TOLD WHAT COMMAND...
TOLD := $(PYTHON) core_cuda/wheels/progress.py

# The build's requirements are installed into the environment, so that jaxlib is downloaded once.
$(VENV)/.requirements: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "diptych needs Python 3.11 or newer; set PYTHON="'
	@echo "== packages: torch, jax and tools, into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(TOLD) "installing torch" $(BIN)/pip install -c constraints.txt torch==2.13.0 numpy
	$(TOLD) "installing jax and tools" $(BIN)/pip install -c constraints.txt \
	  scikit-build-core pybind11 cmake ninja jax jaxlib numpy jinja2 matplotlib tqdm shtab optax ml_dtypes pytest \
	  pytest-xdist hypothesis allpairspy ruff pyright clang-format safetensors transformers flatbuffers flax equinox \
	  orbax-checkpoint mkdocs-material "mkdocstrings[python]"
	touch $@

$(VENV)/.installed: $(VENV)/.requirements $(SOURCES) pyproject.toml
	@echo "== CUDA: $(DIPTYCH_CUDA); DIPTYCH_CUDA=on compiles its kernels too"
	DIPTYCH_CUDA=$(DIPTYCH_CUDA) $(TOLD) "building the core and the handlers" \
	  $(BIN)/pip install -v --no-build-isolation --no-deps --config-settings build-dir=build/editable -e .
	touch $@

clean:
	rm -rf $(VENV) build dist runs
