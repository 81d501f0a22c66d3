#!/usr/bin/env bash
# Trains on this machine, without a batch system. Without data, it makes sample images first:
#
#   submit/local.sh
#   RANKS_PER_NODE=2 WORKERS="0 2" BASE_DIR=/data/imagenet FILE_LIST=train.txt submit/local.sh
#
# Settings are variables (submit/_job.sh lists all). Different defaults here: RANKS_PER_NODE is 1, and NSTEPS is 20. If
# fastload is missing, it is installed in .venv in the clone (scripts/_env.sh).

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
NSTEPS="${NSTEPS:-20}"
source submit/_job.sh
: "${MODULES=}" "${DEPTH:=}"

use_environment images arrow tensorboard
load_environment
if [[ -z "$PACKED$FILE_LIST" ]]; then
    say "sample images"
    python -m fastload images samples --count 512
    BASE_DIR=samples FILE_LIST=filelist.txt
fi
read_nodes < <(hostname)
prepare

if [[ -n "$STAGE" ]]; then
    say "stage $PACKED"
    logged stage python -m fastload set stage "$PACKED" "$STAGE"
fi
for workers in $WORKERS; do
    say "train with $workers workers"
    logged "w$workers" python -m fastload submit --parallelism "$RANKS" ${DEPTH:+--depth "$DEPTH"} \
        --executor python --module fastload -- train --nworkers "$workers" "${TRAIN[@]}"
done
say "done"
