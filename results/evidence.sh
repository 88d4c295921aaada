#!/bin/sh
# The studies behind docs/reproduction.md, in order. Resumable: run it again after an interruption.
#   results/evidence.sh DATA OUT [PART...]
# DATA: folder of covidfl96/, retina_kaggle96/, fundus_multisite96/; PART: a function below, or all with the pretrained trunk
# WEIGHTS: an ImageNet MobileNetV2 trunk, unless it lies in DATA/../weights; JOBS: runs at a time, unless one per core;
# ON, RATES, MAIN: some of a part's federations, rates, methods, unless all; SEEDS: unless ten
# OUT/minutes.txt says how long each part took; the comments say minutes of one core: seven hours for all parts with the trunk,
# so three and a half on two cores; a run keeps 10 MB (last4: 70), all of them 60 GB
set -eu
DATA=${1%/} OUT=${2%/}
WEIGHTS=${WEIGHTS:-$DATA/../weights/mobilenet_v2_imagenet_features.safetensors}
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

# The best value of a setting on a fifth of the clients' training images
best() { # name, method, setting, values, options
    name=$1 method=$2 key=$3 values=$4; shift 4
    fedld tune --method $method --grid $key=$values --minutes 60 --resume --out "$OUT/tune/$name" "$@" >&2
    sed -n "s/^$key = //p" "$OUT/tune/$name/tuned.toml"
}

# Table 1 again, every method at its own rate; then ten seeds of the rules
tuned() {
    own=""
    for method in $(echo $ALL | tr , ' '); do
        own="$own --set $method.lr=$(best fundus-$method $method lr 0.01,0.05,0.2 --preset retina-split3-small $PAPER --image-size 24 --rounds 15 \
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

# Pretrained trunk and a head of 64 units on its cached features
HEAD="--image-size 96 --model mobilenet_v2 --head mlp:64 --momentum 0.5 --batch-size 50 --set client_losses=false"
SEEDS=${SEEDS:-0,1,2,3,4,5,6,7,8,9}
FEW=fedavg,scaffold,fedexp,fedld,measured,fedld-measured,fedld-drift,central
FIELD=local,fedavg,fedprox,scaffold,feddyn,fedexp,fedacg,moon,fedlc,fedrs,fedsam,feddisco,fedga,fedrod,fedpac,fedgh
TABLE3=fedavg,fedprox,fedpac,fedgh,scaffold,fedld,consensus,fedld-measured,fedld-drift,central
BLOCKS=fedavg,fedprox,scaffold,feddyn,fedexp,fedld,consensus,fedld-measured,fedld-drift,central
MAIN=${MAIN:-$FIELD,fedld,consensus,fedld-consensus,measured,fedld-measured,fedld-drift,central}
LONG=${LONG:-fedavg,fedprox,fedpac,fedgh,scaffold,fedld,fedld-official,fedld-measured,fedld-drift,central}
DIFFERENT="covid retina-dirichlet0.1 fundus-dirichlet0.5"
EVERY="$DIFFERENT retina-split1 retina-split2 retina-split3 fundus-dirichlet1 fundus-dirichlet0.1 fundus-source"
WHAT=head HOW="--train head --rounds 20" # what is tuned
TERMS="--decompose 20 --decompose-samples 100"

federation() { # a name; gives its file, how it is dealt, the paper's lambda, five learning rates, the middle one, the seeds they are tuned with and by what
    rates="0.001 0.003 0.01 0.03 0.1" middle=0.01 lambda=0.03 tuning=0,1 by=accuracy paper_rate=0.01
    case $1 in
    covid*) file=covidfl96 rates="0.003 0.01 0.03 0.1 0.3" middle=0.03 lambda=0.01 tuning=0 paper_rate=0.005 ;;
    retina-split1) lambda=0.1 ;;
    esac
    case $1 in retina-split*) by=auroc ;; esac # validation images are 71 % diseased, test images half
    case $1 in
    covid) deal="--partition site" ;;
    covid-dirichlet*) deal="--partition dirichlet --clients 5 --alpha ${1#*dirichlet}" ;;
    retina-split*) file=retina_kaggle96 deal="--partition column:sslfl_split${1#retina-split}" ;;
    retina-dirichlet*) file=retina_kaggle96 deal="--partition dirichlet --clients 5 --alpha ${1#*dirichlet}" ;;
    fundus-source) file=fundus_multisite96 deal="--partition column:source" lambda=0.01 ;;
    fundus-dirichlet*) file=fundus_multisite96 deal="--partition dirichlet --clients 5 --alpha ${1#*dirichlet}" ;;
    *) echo "unknown federation '$1'" >&2; exit 2 ;;
    esac
    margin="{name=\"marg-log\",lam=$lambda}" file="npz:$DATA/$file/$file.npz"
}
heads() { # federation, name of the study, methods, options
    federation $1; study=$1-$2 methods=$3; shift 3
    for own in fedld fedld-consensus fedld-measured fedld-drift; do
        case ",$methods," in *",$own,"*) margins="${margins:-} --set $own.objective=$margin" ;; esac
    done
    fedld compare $HEAD --weights "$WEIGHTS" --dataset "$file" $deal --methods $methods --resume --out "$OUT/$study" \
        ${JOBS:+--jobs $JOBS} ${margins:-} "$@"
    margins=""
}
tune_head() { # federation, method, setting, values, options; patients of validation images, where known, are in no training set
    on=$1 method=$2 key=$3 values=$4; shift 4
    federation $on
    case $method in
    fedld*) set -- --set "objective=$margin" "$@" ;;
    local) by=accuracy ;; # it has no global model
    esac
    best $on-$WHAT-$method${TUNES:-} $method $key $(echo $values | tr ' ' ,) $HEAD --weights "$WEIGHTS" --dataset "$file" $deal \
        $HOW --workers 0 --seeds $tuning --primary $by "$@"
}

# Accuracy against five learning rates. COVID-FL 35 minutes of a core (400 runs of 5 s), the others 14 each (2 s)
sensitivity_rate() {
    for on in ${ON:-$DIFFERENT}; do
        federation $on
        for rate in ${RATES:-$rates}; do
            methods=$FEW
            [ $rate != 0.3 ] || methods=${FEW%,central} # pooled training diverges
            heads $on head-lr$rate $methods --train head --rounds 20 --lr $rate --seeds $SEEDS
        done
    done
}
# Accuracy against heterogeneity, at one rate. 13 minutes each
sensitivity_alpha() {
    for on in ${ON:-fundus retina}; do
        for alpha in 100 10 1 0.5 0.1 0.05; do
            heads $on-dirichlet$alpha head-lr0.01 $FEW --train head --rounds 20 --lr 0.01 --seeds $SEEDS
        done
    done
}
# Every method at its own rate, and at that rate its own lambda or mu. COVID-FL 30 minutes, the others 12 each
tuned_heads() {
    for on in ${ON:-$EVERY}; do
        federation $on
        chosen=""
        for method in $(echo $MAIN | tr , ' '); do
            own=$(tune_head $on $method lr "$rates")
            chosen="$chosen --set $method.lr=$own"
            case $method in
            fedld*)
                lam=$(TUNES=-lam tune_head $on $method lam "0.003 0.01 0.03 0.1" --lr $own)
                chosen="$chosen --set $method.objective={name=\"marg-log\",lam=$lam}"
                [ $lam = $lambda ] || continue
                ;;
            fedprox | moon)
                mu=$(TUNES=-mu tune_head $on $method mu "0.001 0.01 0.1 1" --lr $own)
                chosen="$chosen --set $method.mu=$mu"
                continue
                ;;
            esac
            [ $own != $middle ] || take $on-head-shared $on-head-tuned $method
        done
        heads $on head-tuned $MAIN --train head --rounds 20 --seeds $SEEDS $TERMS $chosen
    done
}
take() { # study, another, method: runs that both have are not made twice
    for run in "$OUT/$1/runs/$3"-seed*; do
        [ ! -e "$run/summary.json" ] || [ -e "$OUT/$2/runs/${run##*/}" ] || {
            mkdir -p "$OUT/$2/runs"
            cp -r "$run" "$OUT/$2/runs/"
        }
    done
}
# Methods in closed form: linear ones once, since neither the seed nor the partition changes them; with 4,096 random units ten seeds.
# One round; one minute and five minutes each
closed_heads() {
    for on in ${ON:-$EVERY}; do
        heads $on head-closed ridge,lda --head linear --train head --rounds 1 --seeds 0
        heads $on head-balanced ridge,lda --head linear --train head --rounds 1 --seeds 0 \
            --set ridge.balanced=true --set lda.balanced=true
    done
    for on in ${ON:-$EVERY}; do
        heads $on head-random ridge --head linear --train head --rounds 1 --seeds $SEEDS --set ridge.features=random:4096
    done
}
# The same on chest X-rays with another trunk, EfficientNet-Lite0. TRUNK2: its weights, unless they lie in DATA/../weights
closed_trunk2() {
    WEIGHTS=${TRUNK2:-$DATA/../weights/efficientnet_lite0_imagenet.safetensors}
    heads covid efficientnet-closed ridge,lda --model efficientnet_lite0 --head linear --train head --rounds 1 --seeds 0
    heads covid efficientnet-random ridge --model efficientnet_lite0 --head linear --train head --rounds 1 --seeds $SEEDS \
        --set ridge.features=random:4096
}
# The same at one rate for all, the middle of the five. COVID-FL 14 minutes, the others 6 each
shared_heads() {
    for on in ${ON:-$EVERY}; do
        federation $on
        heads $on head-shared $MAIN --train head --rounds 20 --seeds $SEEDS $TERMS --lr $middle
    done
}
# Two hundred rounds, as in the paper and at its rate. COVID-FL 40 seconds of a core a run
long_heads() {
    for on in ${ON:-covid}; do
        federation $on
        heads $on head-rounds200 $LONG --train head --rounds 200 --lr $paper_rate --seeds $SEEDS --eval-every 5 \
            --decompose 200 --decompose-samples 100
    done
}
# The paper's Table 2 on the published Retina splits, on Dirichlet 100, 1 and 0.5, and on COVID-FL by site, at the middle rate.
# 10, 2 and 5 minutes
table2_heads() {
    for on in ${ON:-retina fundus covid}; do
        splits=retina-split1,retina-split2,retina-split3
        [ $on != covid ] || splits=covid-fl
        paper $on table2 20 --splits $splits
    done
}
# Its Table 3, 50 clients of Dirichlet 0.5, five of them in each round. 4 minutes each
table3_heads() {
    for on in ${ON:-fundus retina covid}; do paper $on table3 100 --methods $TABLE3; done
}
paper() { # data set, table, rounds, options
    federation $1-dirichlet0.5
    to=$OUT/$1-head-$2 table=$2 rounds=$3; shift 3
    fedld reproduce $table $HEAD --train head --weights "$WEIGHTS" --dataset "$file" --seeds $SEEDS --lr $middle --set weight_decay=0 \
        --rounds $rounds --decompose $rounds --decompose-samples 100 ${JOBS:+--jobs $JOBS} --resume --out "$to" "$@"
}
# Figure 2 from the pretrained trunk with a new head, ten seeds. 5 minutes each
figure2_heads() {
    for on in ${ON:-fundus retina covid}; do
        federation $on-dirichlet1
        fedld reproduce figure2 $HEAD --train head --weights "$WEIGHTS" --dataset "$file" --clients 5 --lr 0.01 \
            --set "objective=$margin" --seeds $SEEDS ${JOBS:+--jobs $JOBS} --resume \
            --out "$OUT/figure2-$on-head"
    done
}
# The last four blocks of the trunk trained too, BatchNorm's statistics left as they are (the released code's way: averaged ones
# ended 9 points lower on validation images); every method at its own rate. 105 minutes (30 trials of 55 s, 50 runs of 95 s)
last4() {
    for on in ${ON:-covid}; do
        chosen=""
        for method in $(echo $BLOCKS | tr , ' '); do
            own=$(WHAT=last4 HOW="--train last:4 --buffers frozen --rounds 10" tune_head $on $method lr "0.001 0.003 0.01")
            chosen="$chosen --set $method.lr=$own"
        done
        heads $on last4 $BLOCKS --train last:4 --buffers frozen --rounds 15 --seeds 0,1,2,3,4 --decompose 15 --decompose-samples 40 $chosen
    done
}

# Accuracy against epsilon: FedAvg, a linear head on features as the trunk gives them, because private runs may not standardise
# them. Private and plain runs choose their rate alike on a fifth of the clients' images, private ones the clip too.
# LEVELS, CLIPS: some of the epsilons and clips, unless all; SOME: seeds, unless five. One minute a trial of one clip, three a level
private_heads() {
    raw="--head linear --train head --rounds 20"
    for on in ${ON:-covid fundus-dirichlet0.5}; do
        federation $on
        for level in ${LEVELS:-plain 8 4 2 1}; do
            case $level in
            plain) trials=$(private_trial $on plain "" "0.0003 0.001 0.003 0.01 0.03 0.1" --no-standardise) ;;
            *)
                trials=""
                for clip in ${CLIPS:-1 10}; do
                    rates="0.01 0.03 0.1 0.3"
                    [ $clip = 1 ] || rates="0.001 0.003 0.01 0.03"
                    case $on-$level-$clip in # where the smallest noise lets steps be larger
                    covid-[48]-1) rates="0.1 0.3 1 3" ;;
                    covid-[48]-10) rates="0.01 0.03 0.1 0.3" ;;
                    esac
                    trials="$trials$(private_trial $on epsilon$level $clip "$rates" --dp epsilon=$level,delta=1e-5,clip=$clip)
"
                done
                ;;
            esac
            [ -z "${CLIPS:-}" ] || continue # a part of the search
            best=$(echo "$trials" | sort -g | tail -n 1)
            rate=${best##* } clip=$(echo "$best" | cut -d " " -f 2)
            case $level in
            plain) heads $on private-plain fedavg $raw --no-standardise --lr $rate --seeds ${SOME:-0,1,2,3,4} ;;
            *) heads $on private-epsilon$level fedavg $raw --dp epsilon=$level,delta=1e-5,clip=$clip --lr $rate --seeds ${SOME:-0,1,2,3,4} ;;
            esac
        done
    done
}
private_trial() { # federation, level, clip, rates, options; gives the best rate's validation accuracy, the clip, the rate
    on=$1 level=$2 clip=$3 values=$4; shift 4
    name=$on-private-$level${clip:+-clip$clip}
    rate=$(best $name fedavg lr $(echo $values | tr ' ' ,) $HEAD --weights "$WEIGHTS" --dataset "$file" $deal $raw --workers 0 --seeds 0 "$@")
    score=$(sed -n "s/^# Validation accuracy \([0-9.]*\),.*/\1/p" "$OUT/tune/$name/tuned.toml")
    echo "${score:-0} ${clip:--} $rate"
}

# The tables beside this script, without the folders of this machine
collect() {
    for file in "$OUT"/*/table.md "$OUT"/*/table.json "$OUT"/*/figure2.md "$OUT"/*/figure2.json "$OUT"/tune/*/tune.json; do
        [ -e "$file" ] || continue
        to=$(dirname "$0")/${file#"$OUT"/}
        mkdir -p "$(dirname "$to")"
        sed "s|$WEIGHTS|WEIGHTS|g; s|$DATA/|DATA/|g; s|$OUT/|OUT/|g" "$file" > "$to"
    done
}

[ $# -gt 0 ] || set -- sensitivity_rate shared_heads tuned_heads figure2_heads table2_heads table3_heads sensitivity_alpha last4 closed_heads closed_trunk2 long_heads private_heads collect
for part in "$@"; do
    start=$(date +%s)
    $part
    [ $part = collect ] || echo "$part ${ON:-}: $((($(date +%s) - start) / 60)) minutes" | tee -a "$OUT/minutes.txt" >&2
done
