#!/bin/sh
# The studies behind docs/reproduction.md, in order. Resumable: run it again after an interruption.
#   results/evidence.sh DATA OUT     DATA: folder of covidfl96/, retina_kaggle96/, fundus_multisite96/
set -eu
DATA=$1 OUT=$2
PAPER="--momentum 0.5 --set weight_decay=5e-4 --batch-size 50"
FOUR=fedavg,fedld,consensus,fedld-consensus
RULES=$FOUR,fedld-tensor
ALL=$RULES,fedld-official,fedld-smooth,fedprox,fedbn,fedpac,fedgh,local,central

study() { # name, table, data, options
    name=$1 table=$2 data=$3; shift 3
    fedld reproduce "$table" --dataset "npz:$DATA/$data/$data.npz" $PAPER --resume --out "$OUT/$name" "$@"
}

# The rules, at two learning rates: COVID-FL by site, Retina as Dirichlet 0.5 (the whole file, not its published lists)
COVID="table1 covidfl96 --splits covid-fl --image-size 24 --rounds 25 --decompose 25 --decompose-samples 40"
retina() {
    fedld compare --dataset "npz:$DATA/retina_kaggle96/retina_kaggle96.npz" $PAPER --model resnet8 --image-size 32 \
        --partition dirichlet --set alpha=0.5 --clients 5 --rounds 20 --lr $1 --methods $2 --seeds 0,1,2 \
        --set client_losses=false --decompose 20 --decompose-samples 100 --resume --out "$OUT/retina-rules-lr$1"
}
study covid-rules-lr0.05 $COVID --lr 0.05 --methods $RULES
retina 0.05 $RULES
study covid-rules-lr0.01 $COVID --lr 0.01 --methods $FOUR
retina 0.01 $FOUR

# Table 1 on COVID-FL by site, all methods
study covid-lr0.05 $COVID --lr 0.05 --methods $ALL
