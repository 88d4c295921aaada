#!/bin/sh
# The studies behind docs/reproduction.md, in order. Resumable: run it again after an interruption.
#   results/evidence.sh DATA OUT [PART...]
# DATA: folder of covidfl96/, retina_kaggle96/, fundus_multisite96/; PART: a function below, or all
set -eu
DATA=${1%/} OUT=${2%/}
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

# The rules at other rates: COVID-FL by site (rate 0.05: below), Retina as Dirichlet 0.5 (the whole file, not its published lists)
retina() {
    fedld compare --dataset "npz:$DATA/retina_kaggle96/retina_kaggle96.npz" $PAPER --model resnet8 --image-size 32 \
        --partition dirichlet --set alpha=0.5 --clients 5 --rounds 20 --lr $1 --methods $2 --seeds 0,1,2 \
        --set client_losses=false --decompose 20 --decompose-samples 100 --resume --out "$OUT/retina-rules-lr$1"
}
rules() {
    retina 0.05 $RULES
    study covid-rules-lr0.01 $COVID --lr 0.01 --methods $FOUR
    retina 0.01 $FOUR
}

# Tables 1-3 on the photographs of two programmes, one shared rate
fundus() {
    study fundus-table1-dirichlet0.5 table1 $FUNDUS --lr 0.05 --splits retina-split3 --methods $ALL
    study fundus-table1-source table1 $FUNDUS --lr 0.05 --splits covid-fl --partition column:source --methods $TABLE1
    study fundus-table2 table2 $FUNDUS --lr 0.05 --splits retina-split3
    study fundus-table3 table3 $TEN --lr 0.05 --methods $TABLE1
    study fundus-table1-dirichlet100-1 table1 $FUNDUS --lr 0.05 --splits retina-split1,retina-split2 \
        --methods fedavg,fedprox,fedld,consensus
}

# The best rate of a method on a fifth of the clients' training images
rate() { # name, method, rates, options
    name=$1 method=$2 rates=$3; shift 3
    fedld tune --method $method --grid lr=$rates $PAPER --image-size 24 --minutes 60 --resume \
        --out "$OUT/tune/$name-$method" "$@" >&2
    sed -n 's/^lr = //p' "$OUT/tune/$name-$method/tuned.toml"
}

# Table 1 again, every method at its own rate; then ten seeds of the rules
tuned() {
    own=""
    for method in $(echo $ALL | tr , ' '); do
        own="$own --set $method.lr=$(rate fundus $method 0.01,0.05,0.2 --preset retina-split3-small --rounds 15 \
            --dataset "npz:$DATA/fundus_multisite96/fundus_multisite96.npz")"
    done
    study fundus-table1-tuned table1 $FUNDUS --splits retina-split3 --methods $ALL $own
    study fundus-seeds table1 $FUNDUS --splits retina-split3 --methods $RULES --seeds 0,1,2,3,4,5,6,7,8,9 \
        --set fedld.lr=0.2 --set fedld-tensor.lr=0.2
}

# Table 1 on COVID-FL by site
covid() {
    study covid-table1 $COVID --lr 0.05 --methods $TABLE1,fedld-consensus,fedld-tensor,fedld-official,central
}
# Table 1 on the published lists of Retina
retina_published() {
    study retina-table1 table1 retina_kaggle96 --image-size 32 --rounds 20 --decompose 20 --decompose-samples 100 \
        --lr 0.05 --splits retina-split3 --methods fedavg,fedld,consensus
}

# The tables beside this script, without the folders of this machine
collect() {
    for file in "$OUT"/*/table.md "$OUT"/*/table.json "$OUT"/tune/*/tune.json; do
        to=$(dirname "$0")/${file#"$OUT"/}
        mkdir -p "$(dirname "$to")"
        sed "s|$DATA/|DATA/|g; s|$OUT/|OUT/|g" "$file" > "$to"
    done
}

[ $# -gt 0 ] || set -- rules fundus tuned covid retina_published collect
for part in "$@"; do $part; done
