#!/usr/bin/env bash
# What to run on a GPU. The lines that matter are printed, all of them go to $OUT.
#   bash .ci/gpu.sh                         kernels, training, decoding: RESULTS 6.4
#   bash .ci/gpu.sh swap FOLDER TEXT        a model such as SmolLM2-135M becomes an RNN, by 2 M tokens: RESULTS 6.3
#   bash .ci/gpu.sh judge FOLDER TEXT       these models, in rows and in one text
#   bash .ci/gpu.sh facts FOLDER TEXT       the same, tuned by 1 M tokens of conversations with 4 to 256 facts
#   bash .ci/gpu.sh qwen                    a Qwen3.5 of the 0.8 B's sizes, random weights, beside transformers
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
row=2048                                        # of the tables
rows=4                                          # in a step
million=1000000
text=32768
told='4 16 64 256'
sizes='hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, linear_num_value_heads=16'
if [ "${CPU:-}" ]; then
    device=cpu
    full=
    large='--n_layer=1 --n_head=2 --n_embd=32 --steps=2 --eval_every=2 --log_every=1'
    tokens=256
    steps=20
    lengths='64 128'
    row=200 rows=1 million=400 text=256 told=4
    sizes='hidden_size=32, intermediate_size=64, num_hidden_layers=4, linear_num_value_heads=16'
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

kernels() {
    step tests 240 'passed|failed' "pytest -q test_all.py -k triton"
    step kernels 120 '^[a-z_/, -]+ [0-9]' "python bench.py train --device=$device --batch=8 --heads=16 \
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
    step sample 120 'read in' "python sample.py --device=$device --tokens=400 \
        --init=$out/delta-${lengths%% *}/ckpt.safetensors"
}

swap() {                                        # FOLDER TEXT
    step teacher 330 'tok/s|^validation|rror' "python train.py --init=$1 --data=$2 --device=$device --dtype=bfloat16 \
        --block_size=$row --batch_size=$rows --steps=$((2 * million / row / rows)) --val_tokens=$text --out=$out/teacher"
    for recipe in cache hybrid pure; do
        step $recipe 330 'tok/s|recovered|rror' "python convert.py --from=$1 --data=$2 --device=$device --dtype=bfloat16 \
            --recipe=$recipe --row=$row --batch_size=$rows --steps=$((2 * million / row / rows)) --controls=false \
            ${CPU:+--distil_steps=2 --eval_rows=2} --out=$out/$recipe"
    done
}

judge() {                                       # FOLDER TEXT
    beside=$out/cache/ckpt.safetensors,$out/hybrid/ckpt.safetensors,$out/pure/ckpt.safetensors
    step real 330 ' [0-9]|rror' "python bench.py real $full --init=$1 --data=$2 --device=$device --dtype=bfloat16 \
        --lengths=$row --beside=$beside --out=$out"
    step far 330 ' [0-9]|rror' "python bench.py far --row=$row --lengths=$text --only='sink compressed' --init=$1 \
        --data=$2 --device=$device --dtype=bfloat16 --beside=$beside --out=$out"
}

facts() {                                       # FOLDER TEXT; judge's `real` wrote the conversations
    for n in $told; do
        beside=
        for recipe in cache hybrid pure; do
            step $recipe-$n 120 'tok/s|^validation|rror' "python train.py --init=$out/$recipe/ckpt.safetensors \
                --data=$out/facts-$n.jsonl --device=$device --dtype=bfloat16 --block_size=4096 --batch_size=$rows \
                --steps=$((million / 1024 / rows + 1)) --out=$out/$recipe-$n"
            beside=$beside,$out/$recipe-$n/ckpt.safetensors
        done
        step real-$n 330 ' [0-9]|rror' "python bench.py real $full --init=$1 --data=$2 --device=$device \
            --dtype=bfloat16 --lengths=$row --beside=${beside#,} --out=$out/told-$n"
    done
}

qwen() {
    step folder 120 'rror' "python -c \"import torch, transformers as t; torch.manual_seed(0)
t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig($sizes, head_dim=256, num_attention_heads=8, num_key_value_heads=2,
    tie_word_embeddings=True)).bfloat16().save_pretrained('$out/qwen')\""
    step theirs 120 's a token|rror' "python -c \"import time, torch, transformers as t
m = t.AutoModelForCausalLM.from_pretrained('$out/qwen', dtype=torch.bfloat16).to('$device')
x = torch.ones(1, 16, dtype=torch.long, device='$device')
for n in 20, 220:
    began = time.time(); m.generate(x, max_new_tokens=n, min_new_tokens=n, do_sample=False); took = time.time() - began
print((took / 220), 's a token')\""
    step ours 120 'token|rror' "python sample.py --init=$out/qwen --device=$device --dtype=bfloat16 --tokens=220 --prompt=1"
}

[ "${CPU:-}" ] || nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"${1:-kernels}" "${@:2}"
