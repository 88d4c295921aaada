#!/bin/sh
# The tables of methods in docs/methods.md: every method against `local`, on clients that are alike. Resumable.
#   results/methods.sh DATA OUT [PART...]
# DATA: folder of covidfl96/; PART: head, stack or collect, or all of them; SEEDS, WEIGHTS: as in evidence.sh
set -eu
DATA=${1%/} OUT=${2%/} SEEDS=${SEEDS:-0,1,2,3,4}
WEIGHTS=${WEIGHTS:-$DATA/../weights/mobilenet_v2_imagenet_features.safetensors}
shift 2
SAME="--seeds $SEEDS --partition iid --set client_losses=false --resume ${JOBS:+--jobs $JOBS}"

# All methods but those that match the neurons of plain stacks. 15 minutes of a core
head() {
    names=$(fedld methods --json | python3 -c '
import json, sys
print(",".join(row["name"] for row in json.load(sys.stdin) if row["name"] not in ("fedma", "gamf")))')
    fedld compare $SAME --dataset "npz:$DATA/covidfl96/covidfl96.npz" --clients 12 --image-size 96 --model mobilenet_v2 \
        --weights "$WEIGHTS" --train head --head mlp:64 --lr 0.03 --rounds 15 --set eval_every=3 \
        --methods "$names" --out "$OUT/methods-head"
}
# FedMA and GAMF on a plain stack. 5 minutes of a core
stack() {
    fedld compare $SAME --dataset fundus-sim --image-size 24 --rounds 20 --lr 0.01 --methods fedavg,local,fedma,gamf --out "$OUT/methods-stack"
}
collect() {
    for file in "$OUT"/methods-*/table.md "$OUT"/methods-*/table.json; do
        to=$(dirname "$0")/${file#"$OUT"/}
        mkdir -p "$(dirname "$to")"
        sed "s|$WEIGHTS|WEIGHTS|g; s|$DATA/|DATA/|g; s|$OUT/|OUT/|g" "$file" > "$to"
    done
}
[ $# -gt 0 ] || set -- head stack collect
for part in "$@"; do $part; done
