#!/usr/bin/env bash
# What to run on a GPU. The lines that matter are printed, all of them go to $OUT.
#   bash .ci/gpu.sh                 at most twenty minutes: kernels, training, decoding; see RESULTS 6.4
#   bash .ci/gpu.sh FOLDER TEXT     then a model such as SmolLM2-135M becomes an RNN, on a long text
# CPU=1 tries the script itself, with tiny models and without a GPU.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-out/gpu}
mkdir -p "$out"
device=cuda
full=--full
large='--n_layer=12 --n_head=12 --n_embd=768 --steps=40 --eval_every=40 --log_every=20 --dtype=bfloat16'
tokens=16384                                    # in a step
steps=1000
lengths='1024 4096'
if [ "${CPU:-}" ]; then
    device=cpu
    full=
    large='--n_layer=1 --n_head=2 --n_embd=32 --steps=2 --eval_every=2 --log_every=1'
    tokens=256
    steps=20
    lengths='64 128'
fi

step() {                                        # name, most seconds, the lines that matter, command
    echo "== $1"
    began=$(date +%s)
    timeout "$2" bash -c "$4" > "$out/$1.log" 2>&1 || echo "$1 ended with $?"
    grep -aE "$3" "$out/$1.log" | tail -n 40 | cut -c1-160
    echo "   $(($(date +%s) - began)) s"
}
train() {                                       # name, most seconds, rule, tokens in a row, more flags
    step "$1" "$2" 'tok/s|^validation|rror' "python train.py --device=$device --rule=$3 --block_size=$4 $5 $large \
        --batch_size=$((tokens / $4)) --val_tokens=$tokens --out=$out/$1"
}

[ "${CPU:-}" ] || nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
step tests 240 'passed|failed' "pytest -q test_all.py -k triton"
step kernels 120 '^[a-z/, -]+ [0-9]' "python bench.py train --device=$device --batch=8 --heads=16 \
    --lengths=${lengths// /,} --out=$out"
step default 90 'tok/s|^validation' "python train.py --device=$device --steps=$steps --val_tokens=65536 \
    --out=$out/default"
for T in $lengths; do
    for rule in softmax sum delta; do
        train "$rule-$T" 60 $rule "$T" ''
    done
done
train compiled 150 softmax "${lengths%% *}" --compile
step decode 120 ' [0-9]' "python bench.py decode $full --device=$device --lengths=${lengths// /,},65536 --out=$out"
step sample 120 'read in' "python sample.py --device=$device --compile --tokens=400 \
    --init=$out/delta-${lengths%% *}/ckpt.safetensors"

[ $# = 2 ] || exit 0
for recipe in hybrid pure hedgehog t2r decay; do
    step "$recipe" 3000 'tok/s|recovered' "python convert.py --from=$1 --data=$2 --device=$device --dtype=bfloat16 \
        --recipe=$recipe --loss=next --batch_size=8 --steps=2400 --lr=1e-4 --controls=false --out=$out/$recipe"
done
