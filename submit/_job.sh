# shellcheck shell=bash
# Sourced by the job scripts in this folder, in the folder of the clone. The settings are variables:
#
#   BASE_DIR, FILE_LIST  images: the folder, and the list in it (FILE_LIST is relative to BASE_DIR)
#   PACKED               or a packed set (fastload set pack); STAGE is a folder on the node's own disk to copy it to
#   WORKERS              numbers of loader threads, with one run for each; 0 is serial loading
#   BATCH_SIZE, NSTEPS   batch size per rank; steps of each run
#   PROFILE              if not empty, profile rank 0
#   DEVICE, STEP_MS      see fastload train --help; ARGUMENTS has further arguments
#   RANKS_PER_NODE       ranks per node, with DEPTH cores each, bound by CPU_BIND
#   MODULES, VENV        modules to load (an empty MODULES: none); virtual environment to activate
#   LOGDIR               folder for logs, profiles and stats.csv

set -euo pipefail

say() {
    echo "[$SECONDS] $*"
}

die() {
    echo "fastload: $*" >&2
    exit 1
}

# A batch system signals all processes of the job at once. Ranks then write a checkpoint, and print. bash waits for them
# before it handles its own signal. PBS delivers the output as soon as the login shell around the script has ended, which
# is before that. With -k doe, the job itself writes the file.
SIGNALS=(INT TERM HUP QUIT USR1 USR2)
for name in "${SIGNALS[@]}"; do
    # shellcheck disable=SC2064
    trap "say 'stopped by SIG$name'; exit $((128 + $(kill -l "$name")))" "$name"
done

[[ -f fastload/__main__.py ]] || die "$PWD is not a clone of fastload. Submit from the folder of the clone."

: "${BASE_DIR:=}" "${FILE_LIST:=}" "${PACKED:=}" "${STAGE:=}" "${PROFILE:=}" "${DEVICE:=}" "${STEP_MS:=}"
: "${ARGUMENTS:=}" "${VENV:=}" "${LOGDIR:=logdir}"
: "${WORKERS:=0 1 2 3 4}" "${BATCH_SIZE:=64}" "${NSTEPS:=100}"
JOB="${PBS_JOBID:-${SLURM_JOB_ID:-local}}"
JOB="${JOB%%.*}"

# Modules, conda and virtual environments read variables that are not set.
load_environment() {
    local name
    say "environment:${MODULES:+ $MODULES}${*:+ $*}${VENV:+ $VENV}"
    set +u
    for name in $MODULES; do
        module load "$name"
    done
    "$@"
    if [[ -n "$VENV" ]]; then
        # shellcheck disable=SC1091
        source "$VENV/bin/activate"
    fi
    set -u
    command -v python >/dev/null || die "there is no python on PATH. Name modules that have one in MODULES, or set VENV."
    say "$(command -v python): $(python --version 2>&1)"
}

# Sets HOSTS, NODES, PROCESSES and MASTER_ADDR from a node file on standard input. The file lists a host once per process,
# or only once. The first host is the master.
read_nodes() {
    mapfile -t listed < <(grep '[^[:space:]]')
    mapfile -t HOSTS < <(printf '%s\n' "${listed[@]}" | awk '!seen[$1]++ { print $1 }')
    PROCESSES=${#listed[@]}
    NODES=${#HOSTS[@]}
    ((PROCESSES)) || die "the node file lists no hosts. Check PBS_NODEFILE, or the allocation of the job."
    export MASTER_ADDR="${HOSTS[0]}"
}

# Sets RANKS, and the options of every run.
prepare() {
    : "${RANKS_PER_NODE:=$((PROCESSES / NODES))}"
    RANKS=$((NODES * RANKS_PER_NODE))
    say "NODES=$NODES RANKS_PER_NODE=$RANKS_PER_NODE RANKS=$RANKS MASTER_ADDR=$MASTER_ADDR"
    mkdir -p "$LOGDIR"
    TRAIN=(--nbatch "$BATCH_SIZE" --nsteps "$NSTEPS" --logdir "$LOGDIR")
    if [[ -n "$PACKED" ]]; then
        TRAIN+=(--packed "${STAGE:-$PACKED}")
    elif [[ -n "$FILE_LIST" ]]; then
        TRAIN+=(${BASE_DIR:+--base-dir "$BASE_DIR"} --file-list-path "$FILE_LIST")
    else
        die "no training data is given. Set PACKED=SET, or BASE_DIR=DIR and FILE_LIST=FILE."
    fi
    TRAIN+=(${PROFILE:+--profile} ${DEVICE:+--device "$DEVICE"} ${STEP_MS:+--step-ms "$STEP_MS"})
    read -ra more <<<"$ARGUMENTS"
    TRAIN+=(${more[@]+"${more[@]}"})
}

# logged NAME COMMAND...: runs the command, and copies its output into LOGDIR. Its standard input is empty.
logged() {
    "${@:2}" </dev/null 2>&1 | (trap '' "${SIGNALS[@]}" && exec tee "$LOGDIR/$JOB-$1.log")
}
