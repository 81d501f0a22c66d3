#!/usr/bin/env bash
# Tests a wheel in an environment of its own, without the clone: the README's example and the core's tests that are not slow.
#
#   scripts/_try_wheel.sh oldest|newest WHEEL SDIST     the tests are those of the sdist
#
# `oldest` installs the oldest torch, NumPy, click and tqdm that pyproject.toml allows, and no extras. It needs Python 3.11 or
# 3.12. `newest` installs what pip finds, and the extra `images`. .venv-oldest and .venv-newest take 6.6 GB each, and are used
# again.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
age="$1" wheel="$(realpath "$2")" sdist="$(realpath "$3")"

python="$VENV-$age/bin/python"
if [[ ! -x "$python" ]]; then
    "$(find_python)" -m venv "$VENV-$age"
fi
cd "$ROOT"
# What the tests need and, for the oldest, the lower bounds of the dependencies as exact versions.
mapfile -t packages < <("$python" -c 'import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*extras["tests"], sep="\n")
if sys.argv[1] == "oldest":
    print(*[needed.replace(">=", "==") + ".*" for needed in project["dependencies"]], sep="\n")
else:
    print(*project["dependencies"], *extras["images"], sep="\n")' "$age")
pip=("$python" -m pip install --disable-pip-version-check --quiet)
[[ "$age" == oldest ]] || pip+=(--upgrade)
"${pip[@]}" "${packages[@]}"
"${pip[@]}" --force-reinstall --no-deps "$wheel"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
tar -xzf "$sdist" -C "$work" --strip-components 1
rm -rf "$work/fastload" # the tests import the installed wheel
cd "$work"
export TORCHINDUCTOR_COMPILE_THREADS=1 # torch 2.8 leaves the pipes of its compiling processes open
"$python" -c 'import fastload, numpy, sys, torch
from fastload.image import kernels
assert fastload.__file__.startswith(sys.prefix), fastload.__file__
print("Testing fastload", fastload.__version__, "with torch", torch.__version__, "and NumPy", numpy.__version__)
print("Image kernels:", kernels.state(), kernels.decoder_state())'
"$python" -m pytest "tests/docs/test_page_examples.py::test_the_examples_of_a_page_run[README.md]"
core=(tests/promises tests/random tests/safety tests/telemetry
    tests/test_{check,errors,sampler,torch_private,window,window_model,windowed_shuffle,workers}.py)
"$python" -m pytest -n auto -m "not slow" "${core[@]}" || # others may have kept the cores busy
    "$python" -m pytest -m "not slow" --last-failed --last-failed-no-failures none "${core[@]}"
