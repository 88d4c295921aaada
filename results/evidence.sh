#!/bin/sh
# The studies behind docs/reproduction.md, in order. Resumable: run it again after an interruption.
#   results/evidence.sh DATA OUT [PART...]
# DATA: folder of covidfl96/, retina_kaggle96/, fundus_multisite96/ and of weights/; PART: a function below, or all
set -eu
DATA=$1 OUT=$2
shift 2
PAPER="--momentum 0.5 --set weight_decay=5e-4 --batch-size 50"
FOUR=fedavg,fedld,consensus,fedld-consensus
RULES=$FOUR,fedld-tensor
TABLE1=fedavg,fedprox,fedbn,fedpac,fedgh,fedld,consensus
ALL=$TABLE1,fedld-consensus,fedld-tensor,fedld-smooth,fedld-official,local,central

study() { # name, table, data, options
    name=$1 table=$2 data=$3; shift 3
    fedld reproduce "$table" --dataset "npz:$DATA/$data/$data.npz" $PAPER --resume --out "$OUT/$name" "$@"
}
COVID="table1 covidfl96 --splits covid-fl --image-size 24 --rounds 25 --decompose 25 --decompose-samples 40"
FUNDUS="fundus_multisite96 --image-size 24 --rounds 20 --decompose 20 --decompose-samples 100"
TEN="fundus_multisite96 --batch-size 20 --image-size 24 --rounds 100 --decompose 100 --decompose-samples 20"

# The rules at two learning rates: COVID-FL by site, Retina as Dirichlet 0.5 (the whole file, not its published lists)
retina() {
    fedld compare --dataset "npz:$DATA/retina_kaggle96/retina_kaggle96.npz" $PAPER --model resnet8 --image-size 32 \
        --partition dirichlet --set alpha=0.5 --clients 5 --rounds 20 --lr $1 --methods $2 --seeds 0,1,2 \
        --set client_losses=false --decompose 20 --decompose-samples 100 --resume --out "$OUT/retina-rules-lr$1"
}
rules() {
    study covid-rules-lr0.05 $COVID --lr 0.05 --methods $RULES
    retina 0.05 $RULES
    study covid-rules-lr0.01 $COVID --lr 0.01 --methods $FOUR
    retina 0.01 $FOUR
}

# Tables 1-3 on the photographs of two programmes, one shared rate
fundus() {
    study fundus-table1-dirichlet0.5 table1 $FUNDUS --lr 0.05 --splits retina-split3 --methods $ALL
}
fundus_more() {
    study fundus-table1-source table1 $FUNDUS --lr 0.05 --splits covid-fl --partition column:source --methods $TABLE1
    study fundus-table1-dirichlet100-1 table1 $FUNDUS --lr 0.05 --splits retina-split1,retina-split2 --methods $TABLE1
    study fundus-table3 table3 $TEN --lr 0.05 --methods $TABLE1
    study fundus-table2 table2 $FUNDUS --lr 0.05
}

# The rate of every method, found on a fifth of the clients' training images, then Table 1 again with it
tuned() {
    rates=""
    for method in $(echo $ALL | tr , ' '); do
        fedld tune --preset retina-split3-small --dataset "npz:$DATA/fundus_multisite96/fundus_multisite96.npz" $PAPER \
            --method $method --image-size 24 --rounds 15 --grid lr=0.01,0.05,0.2 --minutes 60 --resume --out "$OUT/tune/$method"
        rates="$rates --set $method.lr=$(sed -n 's/^lr = //p' "$OUT/tune/$method/tuned.toml")"
    done
    study fundus-table1-tuned table1 $FUNDUS --splits retina-split3 --methods $ALL $rates
}

# Table 1 on COVID-FL by site
covid() {
    study covid-table1 $COVID --lr 0.05 --methods $TABLE1,fedld-consensus,fedld-tensor,fedld-official,central
}

[ $# -gt 0 ] || set -- rules fundus tuned covid fundus_more
for part in "$@"; do $part; done
