# Two commands stand alone on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch is pinned to a build that runs on a CPU; pyproject.toml allows torch>=2.11.
TORCH ?= torch==2.13.0

.PHONY: venv demo test test-all test-kinds test-torch test-users torch-names dist check bench \
	bench-casts exhaustive fuzz docs docs-test clean

venv: $(STAMP)

$(STAMP): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: venv
	$(BIN)/python -m scaledtensor demo

test: venv
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: venv
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""

# What a machine decides, decided otherwise: products in the dtype that it does not choose, the vectors of
# AVX2 where it has others, casts without a C++ compiler, builds by other compilers, a CUDA device that is
# simulated. `make test` has what it does choose. The keys of Inductor's cache lack the vectors of the CPU: what is compiled for others has a folder of its own.
PRODUCTS := tests/test_products.py tests/recipes/test_recipe_products.py tests/ops/test_recurrent.py
ON_CUDA := tests/test_singles.py tests/test_rebalance.py tests/test_scale.py tests/test_optim.py \
	tests/test_scale_in_place.py tests/ops/test_edges.py tests/ops/test_in_place.py \
	tests/ops/test_complex.py tests/test_default_dtype.py tests/recipes/test_recipe_products.py
OTHER := "import torch; from scaledtensor.ops.products.dtype import product_dtype as of; \
	print({torch.float32: 'bfloat16', torch.bfloat16: 'float32'}[of(torch.device('cpu'))])"
VECTORS := "import torch; print(torch.backends.cpu.get_cpu_capability())"

test-kinds: venv
	$(BIN)/python -m pytest -n auto -m kinds
	$(BIN)/python -m pytest -n auto -p benchmarks.on_simulated_cuda $(ON_CUDA)
	SCALEDTENSOR_PRODUCTS=$$($(BIN)/python -c $(OTHER)) \
		$(BIN)/python -m pytest -n auto $(PRODUCTS)
	SCALEDTENSOR_NATIVE=0 $(BIN)/python -m pytest -n auto tests/formats/test_encode.py \
		tests/formats/test_decode.py tests/formats/test_rounding_modes.py tests/formats/test_stochastic.py
	if $(BIN)/python -c $(VECTORS) | grep -q AVX512; then \
		cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
		ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		TORCHINDUCTOR_CACHE_DIR="$$cache" \
		$(BIN)/python -m pytest -n auto $(PRODUCTS) tests/ops/test_product_dtypes.py \
		tests/formats/test_native.py; fi

# The suite under another version of torch, in an environment of its own:
# `make test-torch VERSION=2.15.0`, or with TESTS=tests/ops for a part of it. torch says which setuptools
# it takes. On Linux PyPI's torch brings CUDA; pip's own PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS choose others.
VERSION ?= 2.15.0
TESTS ?= tests
OTHER_VENV := .venv-torch-$(VERSION)
test-torch: $(OTHER_VENV)/.installed
	$(OTHER_VENV)/bin/python -m pytest -n auto $(TESTS)

.venv-torch-%/.installed: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(@D)
	grep -v '^setuptools==' requirements-dev.txt > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$* -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# What each minor version of torch lacks of the names in use: tests/torch_versions/*.json.
VERSIONS := 2.11.0 2.12.1 2.14.1 2.15.0
NAMES := tests/torch_versions/names.py
torch-names: venv $(VERSIONS:%=.venv-torch-%/.installed)
	mkdir -p build/names
	$(BIN)/python $(NAMES) write build/names/first
	for v in $(VERSIONS); do .venv-torch-$$v/bin/python $(NAMES) write build/names/$$v || exit 1; done
	rm -f tests/torch_versions/*.json
	$(BIN)/python $(NAMES) compare build/names/first $(VERSIONS:%=build/names/%)

# What a release uploads: dist/*.whl and dist/*.tar.gz. `tests/test_dist.py` installs such a wheel.
dist: venv
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest tests/test_dist.py

# Programs of users, in an environment of their own on top of .venv: the libraries that they use are many.
# What .venv has stays as it is, torch's build above all. MARKS chooses tests, and all run by default. timm
# and torchvision ask for another torch, and come without the packages that they need. PyPI's torchvision
# does not load beside a CPU build of torch until its operators have names: tests/users/conftest.py gives
# them.
USERS := .venv-users
USERS_PIP := $(USERS)/bin/python -m pip --quiet --disable-pip-version-check
MARKS ?=
test-users: $(USERS)/.installed
	$(USERS)/bin/python -m pytest -n auto -m "$(MARKS)" tests/users

$(USERS)/.installed: $(STAMP) requirements-users.txt
	$(PYTHON) -m venv $(USERS)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $(USERS)/lib/$$(ls $(USERS)/lib)/site-packages/base.pth
	$(BIN)/python -m pip freeze --exclude-editable > $(USERS)/base.txt
	$(USERS_PIP) install -c $(USERS)/base.txt -r requirements-users.txt
	$(USERS_PIP) install --no-deps timm==1.0.31 torchvision==0.28.0
	touch $@

# The documentation site: site/index.html, without the network once the tools are there. They have an
# environment of their own on top of .venv, as programs of users do. `make docs-test` opens every page in
# Chromium, which must be installed (Debian: apt-get install chromium), or named by CHROMIUM.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	$(DOCS)/bin/python docs/build_site.py

docs-test: docs
	$(DOCS)/bin/python -m pytest -m site tests/site

$(DOCS)/.installed: $(STAMP) requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $(DOCS)/lib/$$(ls $(DOCS)/lib)/site-packages/base.pth
	$(BIN)/python -m pip freeze --exclude-editable > $(DOCS)/base.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(DOCS)/base.txt \
		-r requirements-docs.txt
	touch $@

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks.step

bench-casts: venv
	$(BIN)/python -m benchmarks.casts

# 20,000 random programs on ScaledTensors against float64, 200 compiled ones; 200 kills of a training,
# and files that are cut or changed.
fuzz: venv
	$(BIN)/python tests/fuzz --programs 20000 --record docs/reliability.json
	$(BIN)/python tests/fuzz --programs 200 --compile aot_eager --record docs/reliability.json
	$(BIN)/python tests/fuzz --kills 200 --damages 100 --record docs/reliability.json

exhaustive: venv
	$(BIN)/python -m benchmarks.exhaustive

clean:
	rm -rf $(VENV) .venv-torch-* $(USERS) $(DOCS) .mypy_cache .pytest_cache .ruff_cache .hypothesis build \
		dist site *.egg-info
