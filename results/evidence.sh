#!/bin/sh
# The studies behind docs/reproduction.md, in order. Resumable: run it again after an interruption.
#   results/evidence.sh DATA OUT     DATA: folder of covidfl96/, retina_kaggle96/, fundus_multisite96/
set -eu
DATA=$1 OUT=$2
PAPER="--momentum 0.5 --set weight_decay=5e-4 --batch-size 50"
RULES=fedavg,fedld,consensus,fedld-consensus,fedld-tensor
ALL=$RULES,fedld-official,fedld-smooth,fedprox,fedbn,fedpac,fedgh,local,central

study() { # name, table, data, options
    name=$1 table=$2 data=$3; shift 3
    fedld reproduce "$table" --dataset "npz:$DATA/$data/$data.npz" $PAPER --image-size 24 --resume --out "$OUT/$name" "$@"
}

# COVID-FL by site, two learning rates
study covid-lr0.05 table1 covidfl96 --splits covid-fl --rounds 25 --lr 0.05 --methods $ALL --decompose 25 --decompose-samples 40
study covid-lr0.01 table1 covidfl96 --splits covid-fl --rounds 25 --lr 0.01 --methods $RULES --decompose 25 --decompose-samples 40
