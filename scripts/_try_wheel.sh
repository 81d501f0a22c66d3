#!/usr/bin/env bash
# Tests a wheel in an environment of its own, without the clone, and without a compiler on PATH: the README's example, the
# core's tests that are not slow, then with the extra `images` a small training with the wheel's kernels.
#
#   scripts/_try_wheel.sh oldest|newest WHEEL SDIST     the tests are those of the sdist
#
# `oldest` installs the oldest torch, NumPy, click and tqdm that pyproject.toml allows. The core's tests run without
# extras there. It needs Python 3.11 or 3.12. `newest` installs what pip finds. .venv-oldest and .venv-newest take 7 GB
# each, and are used again.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
age="$1" wheel="$(realpath "$2")" sdist="$(realpath "$3")"

python="$VENV-$age/bin/python"
if ! "$python" -m pip --version >/dev/null 2>&1; then
    "$(find_python)" -m venv --clear "$VENV-$age"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Installs what pyproject.toml lists: `dependencies`, or the extra $1. For the oldest, lower bounds become exact versions.
install_listed() {
    local -a pip=("$python" -m pip install --disable-pip-version-check) packages
    mapfile -t packages < <("$python" -c 'import sys, tomllib
age, name, path = sys.argv[1:]
project = tomllib.load(open(path, "rb"))["project"]
listed = project.get(name) or project["optional-dependencies"][name]
exact = age == "oldest" and name != "tests"
print(*[needed.replace(">=", "==") + ".*" if exact else needed for needed in listed], sep="\n")' \
        "$age" "$1" "$ROOT/pyproject.toml")
    [[ "$age" == oldest ]] || pip+=(--upgrade)
    [[ -t 1 ]] || pip+=(--quiet)
    echo "Installing ${packages[*]} in $VENV-$age"
    "${pip[@]}" "${packages[@]}"
}

# The commands of PATH, but no compiler.
hide_compilers() {
    local folder
    local -a folders
    IFS=: read -ra folders <<<"$PATH"
    mkdir "$work/bin"
    for folder in "${folders[@]}"; do
        find "$folder" -maxdepth 1 ! -type d -exec ln -st "$work/bin" {} + 2>/dev/null || true # the first of a name wins
    done
    find "$work/bin" -regextype egrep \
        -regex '.*/([a-z0-9_-]+-)?(cc|c\+\+|gcc|g\+\+|cpp|clang|clang\+\+|c89|c99|tcc|zig|nvcc)[-.0-9a-z]*' -delete
    export PATH="$VENV-$age/bin:$work/bin"
    unset CC CXX
    ! command -v cc gcc g++ c++ clang || die "a compiler is still on PATH"
}

# A real model on generated images. Threads that wait for one another take minutes where others keep the cores busy.
train() {
    fastload env
    fastload images --count 128 samples
    OMP_NUM_THREADS=1 fastload train --file-list samples/filelist.txt --transform rrc --image-size 64 \
        --model resnet18 --device cpu -b 16 -w 2 -s 10
}

install_listed dependencies
install_listed tests
if [[ "$age" == newest ]]; then
    install_listed images
else
    "$python" -m pip uninstall --quiet --yes torchvision pillow # of an earlier call
fi
"$python" -m pip install --disable-pip-version-check --quiet --force-reinstall --no-deps "$wheel"
hide_compilers
tar -xzf "$sdist" -C "$work" --strip-components 1
rm -rf "$work/fastload" # the tests import the installed wheel
cd "$work"
export TORCHINDUCTOR_COMPILE_THREADS=1 # torch 2.8 leaves the pipes of its compiling processes open
python -c 'import fastload, numpy, sys, torch
assert fastload.__file__.startswith(sys.prefix), fastload.__file__
print("Testing fastload", fastload.__version__, "with torch", torch.__version__, "and NumPy", numpy.__version__)'
python -m pytest "tests/docs/test_page_examples.py::test_the_examples_of_a_page_run[README.md]"
core=(tests/promises tests/random tests/safety tests/telemetry
    tests/test_{check,errors,sampler,torch_private,window,window_model,windowed_shuffle,workers}.py)
python -m pytest -n auto -m "not slow" "${core[@]}" || # others may have kept the cores busy
    python -m pytest -m "not slow" --last-failed --last-failed-no-failures none "${core[@]}"
if [[ "$age" == oldest ]]; then
    install_listed images
    python -m pytest tests/safety/test_plain.py
fi
train
