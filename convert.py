"""Turn a pretrained transformer into an RNN: swap its attention, recover what that cost, and say how much.

    python convert.py           Zhang 2024, Hedgehog: out/ckpt.safetensors, or a model that is trained first
    python convert.py --rule=sum --phi=t2r --distil=none    Kasai 2021: swap, then fine-tune
    python convert.py --rule=decay                          Mao 2022
    python convert.py --rule=window --cache=64 --overflow=sum:hedgehog      LoLCATs: a window and the rest
    python convert.py --from=gpt2 --data=wikitext2          weights from the hub, GPT-2 or Llama to 3.0
    python sample.py --init=out/convert/ckpt.safetensors
"""
import copy
import dataclasses
import glob
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize
from safetensors import SafetensorError, safe_open

from data import prepare
from fastweight import RULES
from model import (GPT, Config, config_of, flag, load, pack_optimiser, parse, pick_device, read, replace,
                   save, script, state_bytes, subset, swapped, table, unpack_optimiser, write)


@dataclass
class Args:
    from_: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2, -medium, -large, -xl; OWNER/NAME; folder')
    revision: str = flag('main', 'branch, tag or commit on the hub')
    data: str = flag('', 'data set or text to recover with, if not the one the teacher was trained on')
    out: str = flag('out/convert', 'folder for checkpoint, table and log')
    distil: str = flag('auto', 'stage 1, new parameters only: match attention weights (ce), outputs (mse) or '
                               'hidden states; auto: ce where there are weights',
                       ['auto', 'ce', 'mse', 'hidden', 'none'])
    distil_steps: int = flag(300, 'steps of stage 1', low=0)
    distil_lr: float = flag(1e-2, 'its peak learning rate', low=0)
    steps: int = flag(1000, 'steps of stage 2, fine-tuning', low=0)
    lr: float = flag(5e-4, 'its peak learning rate', low=0)
    loss: str = flag('kl', 'of stage 2: the next token, or the divergence from the teacher', ['next', 'kl'])
    lora: int = flag(0, 'rank of LoRA on q, k, v and output in stage 2; 0: all weights', low=0)
    batch_size: int = flag(4, 'rows a step', low=1)
    row: int = flag(0, 'tokens a row, if fewer than the teacher was trained on', low=0)
    eval_rows: int = flag(64, 'rows of validation text for every figure', low=1)
    fold: bool = flag(False, 'with --phi=t2r: put phi into W_q and W_k at the end')
    export: str = flag('', 'folder for weights and config.json, in the layout of the hub if it has one')
    controls: bool = flag(True, 'also fine-tune the teacher as long, and train the student from scratch')
    eval_every: int = flag(250, 'steps between evaluations, which also save, for --resume', low=1)
    resume: bool = flag(False, 'go on with the conversion that was stopped in --out')
    seed: int = flag(0, 'of new weights and data order', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda')


TEACHER = '--rule=softmax --n_head=4 --steps=2500'
Student = subset('layers', 'phi', 'norm', 'beta_max', 'cache', 'sinks', 'overflow',
               rule=flag('sum', 'what softmax becomes', list(RULES)))


# ---- weights in: GPT-2 and Llama as the hub keeps them -----------------------------------------------------
FAMILIES = {    # what of theirs is ours; * is the layer's number; several are put side by side
    'gpt2': ('transformer.', 'h.*.', {
        'embed': 'wte', 'positions': 'wpe', 'norm': 'ln_f', '*.norm1': 'ln_1', '*.mixer.qkv': 'attn.c_attn',
        '*.mixer.proj': 'attn.c_proj', '*.norm2': 'ln_2', '*.up': 'mlp.c_fc', '*.down': 'mlp.c_proj'}),
    'llama': ('model.', 'layers.*.', {
        'embed': 'embed_tokens', 'norm': 'norm', '*.norm1': 'input_layernorm',
        '*.mixer.qkv': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
        '*.mixer.proj': 'self_attn.o_proj', '*.norm2': 'post_attention_layernorm',
        '*.up': 'mlp.gate_proj mlp.up_proj', '*.down': 'mlp.down_proj'})}
HUB = {f'gpt2{size}': (f'openai-community/gpt2{size}', 'main') for size in ('-medium', '-large', '-xl')} | {
    'gpt2': ('openai-community/gpt2', '607a30d783dfa663caf39e06633721c8d4cfcd7e')}
PINNED = {'607a30d783dfa663caf39e06633721c8d4cfcd7e/model.safetensors':
          (548105171, '248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707')}


def theirs(name, prefix, layer, table):
    """Our parameter's name -> the names of its parts in their file."""
    if name == 'head.weight':
        return ['lm_head.weight']
    module, _, kind = name.rpartition('.')
    found = re.fullmatch(r'blocks\.(\d+)\.(.+)', module)
    if found:
        i, module = found[1], f'*.{found[2]}'
        return [f'{prefix}{layer.replace("*", i)}{p}.{kind}' for p in table[module].split()]
    return [f'{prefix}{table[module]}.{kind}']


def their_config(c, source):
    """config.json -> Config. ValueError for what this project cannot compute exactly."""
    def refuse(why):
        raise ValueError(f'{source}: {why}; known are GPT-2 and Llama as they were published')
    if not isinstance(c, dict):
        raise ValueError(f'{source}/config.json: {json.dumps(c)[:40]} is no description of a model')
    kind = c.get('model_type')
    try:
        if kind == 'gpt2':
            if c.get('activation_function', 'gelu_new') not in ('gelu_new', 'gelu_pytorch_tanh'):
                refuse(f'activation_function {c["activation_function"]}')
            if c.get('scale_attn_by_inverse_layer_idx') or not c.get('scale_attn_weights', True):
                refuse('another scale of attention')
            return Config(rule='softmax', conv=0, pos='learned', act='gelu', bias=True, n_layer=c['n_layer'],
                          n_head=c['n_head'], n_embd=c['n_embd'], vocab_size=c['vocab_size'],
                          block_size=c.get('n_positions') or c['n_ctx'], n_inner=c.get('n_inner') or 0,
                          eps=c.get('layer_norm_epsilon', 1e-5), tied=c.get('tie_word_embeddings', True))
        if kind == 'llama':
            rope = c.get('rope_parameters') or {}
            for way in (rope, c.get('rope_scaling') or {}):
                if way.get('rope_type', way.get('type', 'default')) != 'default':
                    refuse(f'rope of type {way.get("rope_type", way.get("type"))}')
            if c.get('attention_bias') or c.get('mlp_bias') or c.get('hidden_act', 'silu') != 'silu':
                refuse('biases, or another activation than silu')
            if c.get('head_dim') not in (None, c['hidden_size'] // c['num_attention_heads']):
                refuse(f'head_dim {c["head_dim"]} is not hidden_size / num_attention_heads')
            return Config(rule='softmax', conv=0, pos='rope', act='swiglu', rms=True,
                          n_layer=c['num_hidden_layers'], n_head=c['num_attention_heads'],
                          n_kv_head=c.get('num_key_value_heads') or 0, n_embd=c['hidden_size'],
                          n_inner=c['intermediate_size'], vocab_size=c['vocab_size'],
                          block_size=c['max_position_embeddings'], eps=c.get('rms_norm_eps', 1e-6),
                          theta=c.get('rope_theta') or rope.get('rope_theta') or 1e4,
                          tied=c.get('tie_word_embeddings', False))
    except KeyError as e:
        raise ValueError(f'{source}/config.json lacks {e}') from None
    except (TypeError, AttributeError, ZeroDivisionError) as e:
        raise ValueError(f'{source}/config.json: {e}') from None
    refuse(f'model_type {kind}')


def hub(name, revision, root=os.path.join(prepare.HERE, 'hub')):
    """config.json and weights of a hub repository -> their folder; what is not there yet is fetched."""
    repo, pinned = HUB.get(name, (name, 'main'))
    revision = pinned if revision == 'main' else revision
    folder = os.path.join(root, f'{repo.replace("/", "--")}--{revision[:12]}')
    base = (os.environ.get('HF_ENDPOINT') or prepare.HUB).rstrip('/')
    token = {'Authorization': f'Bearer {os.environ["HF_TOKEN"]}'} if os.environ.get('HF_TOKEN') else {}

    def get(file):
        import requests
        path, url = os.path.join(folder, file), f'{base}/{repo}/resolve/{revision}/{file}'
        if not os.path.exists(path):
            try:
                head = requests.head(url, headers=token, timeout=(10, 30))
            except requests.RequestException as e:
                raise ValueError(f'{url}: {type(e).__name__}; or put the file at {path} by hand') from None
            if head.status_code in (401, 403):
                raise ValueError(f'{url}: HTTP {head.status_code}; a private or gated model needs HF_TOKEN')
            if head.status_code == 404:
                return None
            sha256 = re.fullmatch('"?([0-9a-f]{64})"?', head.headers.get('X-Linked-Etag', ''))
            size, sha256 = PINNED.get(f'{revision}/{file}') or (int(head.headers.get('X-Linked-Size', 0)),
                                                                sha256 and sha256[1])
            prepare.download(url, path, size, sha256, **token)
        return path
    if not get('config.json'):
        raise ValueError(f'{base}/{repo}: no such model at revision {revision}')
    if not get('model.safetensors'):
        index = get('model.safetensors.index.json')
        if not index:
            raise ValueError(f'{base}/{repo}: neither model.safetensors nor its index; pickled weights '
                             '(.bin, .pt) are not read')
        for shard in sorted(set(json.loads(prepare.read(index))['weight_map'].values())):
            if not get(os.path.basename(shard)):
                raise ValueError(f'{base}/{repo}: {shard} is missing')
    return folder


def from_folder(folder, source, changes):
    """A folder with config.json and *.safetensors -> GPT, each tensor read once. changes: flags of `Swap`."""
    try:
        with open(os.path.join(folder, 'config.json'), encoding='utf-8') as f:
            raw = json.load(f)
    except (OSError, ValueError) as e:
        raise ValueError(f'{folder}/config.json: {e}') from None
    shards = sorted(n for n in os.listdir(folder) if n.endswith('.safetensors'))
    if not shards:
        raise ValueError(f'{folder}: no model.safetensors; pickled weights (.bin, .pt) are not read')
    config, (prefix, layer, table) = their_config(raw, source), FAMILIES[raw['model_type']]
    with torch.device('meta'):
        model = GPT(config)
    where = {}
    try:
        for path in (os.path.join(folder, n) for n in shards):
            with safe_open(path, 'pt') as f:
                where |= dict.fromkeys(f.keys(), path)
    except (SafetensorError, OSError) as e:
        raise ValueError(f'{folder}: not whole safetensors files ({e})') from None

    def get(n):     # a private map of the file, opened anew: what is only copied from does not stay in memory
        with safe_open(where[n], 'pt') as f:
            return f.get_tensor(n)
    if not any(n.startswith(prefix) for n in where):            # as some are kept, without
        prefix = ''
    state = {}
    for name, p in model.state_dict().items():
        parts = theirs(name, prefix, layer, table)
        for n in parts:
            if n not in where:
                raise ValueError(f'{source}: tensor {n} is missing')
        x = [get(n) for n in parts]
        if raw['model_type'] == 'gpt2' and x[0].dim() == 2 and name.startswith('blocks'):
            x = [y.mT for y in x]                               # Conv1D keeps (in, out)
        x = (x[0] if len(x) == 1 else torch.cat(x)).float().contiguous()
        if x.shape != p.shape:
            raise ValueError(f'{source}: {parts[0]} has shape {tuple(x.shape)}, expected {tuple(p.shape)}')
        state[name] = x
    model.load_state_dict(state, assign=True)
    return swapped(model, source, **changes)


def pretrained(source, revision='main', device='cpu', **changes):
    """A checkpoint of this project, a folder in the hub's layout, or the name of a model on the hub ->
    the softmax model as it is, and metadata that names its tokenizer. changes: flags of `Swap`."""
    if os.path.isfile(source) or source.endswith('.safetensors'):
        return load(source, device, **changes)
    if os.path.splitext(source)[1] in ('.bin', '.pt', '.pth', '.ckpt'):
        raise ValueError(f'{source}: pickled weights are not read; take model.safetensors')
    if not os.path.isdir(source) and not re.fullmatch(r'[\w.-]+(/[\w.-]+)?', source):
        raise ValueError(f'{source}: no such file or folder, nor OWNER/NAME on the hub; python train.py '
                         '--rule=softmax writes out/ckpt.safetensors')
    folder = source if os.path.isdir(source) else hub(source, revision)
    model = from_folder(folder, source, changes).to(device)
    size = model.config.vocab_size
    data = {'name': source, 'tokenizer': 'gpt2' if size == 50257 else 'ids', 'vocab_size': size}
    return model, {'data': data, 'step': 0}


def export(model, folder):
    """Hub's layout for GPT-2 and Llama with all their softmax; else our own names, and our config."""
    c, state, family = model.config, model.state_dict(), None
    if {*c.rules()} <= {'softmax', 'full'} and not c.conv:
        kinds = {('gelu', 'learned', False): 'gpt2', ('swiglu', 'rope', True): 'llama'}
        family = kinds.get((c.act, c.pos, c.rms))
    raw = {'model_type': 'nanofwp', **dataclasses.asdict(c)}
    inner, kv = c.n_inner or 4 * c.n_embd, c.n_kv_head or c.n_head
    if family == 'gpt2':
        raw = dict(architectures=['GPT2LMHeadModel'], n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
                   n_inner=inner, n_positions=c.block_size, layer_norm_epsilon=c.eps,
                   activation_function='gelu_new')
    if family == 'llama':
        raw = dict(architectures=['LlamaForCausalLM'], num_hidden_layers=c.n_layer, hidden_size=c.n_embd,
                   num_attention_heads=c.n_head, num_key_value_heads=kv, intermediate_size=inner,
                   max_position_embeddings=c.block_size, rms_norm_eps=c.eps, rope_theta=c.theta,
                   hidden_act='silu')
    if family:
        raw |= dict(model_type=family, vocab_size=c.vocab_size, tie_word_embeddings=c.tied)
        out, d = {}, c.n_embd // c.n_head
        for name, x in state.items():
            parts = theirs(name, *FAMILIES[family])
            x = x.mT if family == 'gpt2' and x.dim() == 2 and name.startswith('blocks') else x
            sizes = [d * n for n in (c.n_head, kv, kv)] if len(parts) == 3 else len(x) // len(parts)
            out |= {n: y.contiguous() for n, y in zip(parts, x.split(sizes))}
        state = out
    state = {n: x.detach().cpu().contiguous() for n, x in state.items()}
    replace(os.path.join(folder, 'model.safetensors'), state, {'format': 'pt'})
    with open(os.path.join(folder, 'config.json'), 'w') as f:
        json.dump(raw, f, indent=1)


# ---- the swap ----------------------------------------------------------------------------------------------
def swap(teacher, changes):
    """A GPT with the teacher's weights, the same tensors, where it has them; and the names of the others."""
    old = teacher.config
    pos = 'rope' if old.turns() else old.pos
    config = dataclasses.replace(old, **{'layers': '', 'pos': pos, **changes})
    student = GPT(config)
    missing, extra = student.load_state_dict(teacher.state_dict(), strict=False, assign=True)
    if extra:
        raise ValueError(f'the teacher has {extra[0]}, which no rule of the student has room for')
    buffers = {n for n, _ in student.named_buffers()}
    return student.to(next(teacher.parameters()).device), {n for n in missing if n not in buffers}


def can_fold(model):
    """ValueError unless every layer has a T2R map of d features straight after W_q and W_k."""
    c = model.config
    if c.phi.split(':')[0] != 't2r' or c.turns() or c.keeps() != {None}:
        raise ValueError('--fold needs --phi=t2r in all layers, and no rope between W_q and phi')
    d = c.n_embd // c.n_head
    if any(b.mixer.memory.phi.weight.shape[1] != d for b in model.blocks):
        raise ValueError(f'--fold needs as many features as a head has channels: --phi=t2r:{d}')


def fold(model):
    """phi = relu(W x + b) put into W_q and W_k: relu((W W_q) x + (W b_q + b)). Exact. Kasai 2021 sec. 3.1
    ->  a GPT with phi = relu"""
    can_fold(model)
    c, d = model.config, model.config.n_embd // model.config.n_head
    folded = GPT(dataclasses.replace(c, phi='relu', bias=True)).to(model.embed.weight)
    state = {n: torch.zeros_like(x) if n.endswith('.bias') else x for n, x in folded.state_dict().items()}
    state |= {n: x for n, x in model.state_dict().items() if n in state}
    for i, block in enumerate(model.blocks):
        phi = block.mixer.memory.phi
        W, b = phi.weight, phi.bias.squeeze(1)                  # (H, d, d), (H, d)
        name = f'blocks.{i}.mixer.qkv.'
        heads, bias = state[name + 'weight'].view(3, -1, d, c.n_embd), state[name + 'bias'].view(3, -1, d)
        state[name + 'weight'] = torch.cat([W @ heads[:2], heads[2:]]).reshape(-1, c.n_embd)
        state[name + 'bias'] = torch.cat([(W @ bias[:2, ..., None])[..., 0] + b, bias[2:]]).reshape(-1)
    folded.load_state_dict(state)
    return folded


def weights(mixer, u, q, k):
    """(B, H, T, T): how much of each value is in each output. These are linear in v, so take v = I."""
    T = q.shape[2]
    if mixer.memory.rule.keeps == 'all':
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return scores.masked_fill(scores.new_ones(T, T).tril() == 0, -math.inf).softmax(-1)
    eye = torch.eye(T, device=q.device).expand(*q.shape[:2], T, T)
    return mixer.memory(u, q, k, eye)[0]


def through(model, tokens):
    """Layer by layer: its block, its input, and of its mixer input u, queries, keys, values, output."""
    x = model.first(tokens)
    for block in model.blocks:
        u = block.view(0, block.norm1(x), {}, {})
        q, k, v = block.mixer.heads(u)
        yield block, x, u, q, k, v, block.mixer.memory(u, q, k, v)[0]
        x = block(x, None, model.form)[0]


def has_weights(mixer):
    """Whether the outputs are means of values, with weights that can be compared."""
    m = mixer.memory
    return m.rule.keeps is None and m.norm == 'attn' and not m.rule.erase


def mismatch(kind, block, student, x, u, q, k, v, o, form):
    """How far a student's layer is from the teacher's on the same input."""
    if kind == 'hidden':                                        # MOHAWK
        return F.mse_loss(student(x, None, form)[0], block(x, None, form)[0])
    if kind == 'ce':                                            # Zhang 2024 eq. 4
        a, w = weights(block.mixer, u, q, k), weights(student.mixer, u, q, k)
        return -(a * w.clamp(min=1e-8).log()).sum(-1).mean()
    o_s = student.mixer.memory(u, q, k, v, form=form)[0]        # LoLCATs
    o_s = o_s if student.mixer.out_norm is None else student.mixer.out_norm(o_s)
    return F.mse_loss(o_s, o) / o.var()


# ---- recovery ----------------------------------------------------------------------------------------------
def rows(data, args, T, step, device):
    """Step's rows of text, (B, T + 1); a function of the seed and the step."""
    rng = np.random.Generator(np.random.Philox(key=args.seed, counter=[0, 0, 1, step]))
    begin = rng.integers(len(data) - T, size=args.batch_size)
    return torch.from_numpy(np.stack([data[i:i + T + 1] for i in begin]).astype(np.int64)).to(device)


class Progress:
    """What a conversion has done so far: log.jsonl, and a file a stage, from which --resume goes on.
    flags: those of the run, to be found again; None: keep nothing. score(model): logged beside the loss."""
    def __init__(self, args, flags=None, score=lambda model: {}):
        self.args, self.flags, self.score = args, flags, score
        self.seconds = {}                           # by stage, also of earlier calls

    def path(self, stage):
        return os.path.join(self.args.out, f'stage-{re.sub("[^a-z]+", "-", stage)}.safetensors')

    def load(self, stage, model, opt):
        """-> the steps that are done already, their results put into model and opt."""
        if not (self.flags and self.args.resume and os.path.exists(self.path(stage))):
            return 0
        tensors, meta = read(self.path(stage))
        for key, now in self.flags['made_from'].items():
            if meta['made_from'][key] != now:
                raise ValueError(f'--resume: the {key} is not what the run began with; start anew')
        model.load_state_dict({k[6:]: x for k, x in tensors.items() if k.startswith('model.')})
        unpack_optimiser(model, opt, tensors)
        self.seconds[stage] = meta['seconds']
        return meta['step']

    def save(self, stage, model, opt, step, loss):
        if self.flags:
            kept = {f'model.{k}': x for k, x in model.state_dict().items()} | pack_optimiser(model, opt)
            write(self.path(stage), kept, {**self.flags, 'step': step, 'seconds': self.seconds[stage]})
            with open(os.path.join(self.args.out, 'log.jsonl'), 'a') as f:
                f.write(json.dumps({'stage': stage, 'step': step, 'loss': loss, **self.score(model)}) + '\n')

    def stages(self):
        return sorted(glob.glob(os.path.join(glob.escape(self.args.out), 'stage-*.safetensors')))

    def forget(self):
        """All of it but the log."""
        for path in self.stages():
            os.remove(path)


def optimise(model, lr, steps, loss, stage, progress):
    """AdamW for `steps` on what requires gradients; loss(step) calls backward itself, and returns a number.
    Warm-up, cosine to 0. All that is drawn is a function of seed and step, so resuming is exact on a CPU."""
    from tqdm import tqdm
    args, parameters = progress.args, [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    done = progress.load(stage, model, opt)
    begin = time.perf_counter() - progress.seconds.get(stage, 0)
    with tqdm(range(done, steps), desc=stage, initial=done, total=steps, disable=None) as bar:
        for step in bar:
            torch.manual_seed(int(np.random.SeedSequence((args.seed, step)).generate_state(1)[0]))
            warm = max(1, steps // 20)
            scale = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in opt.param_groups:
                group['lr'] = lr * scale
            value = loss(step)
            if not math.isfinite(value):
                raise ValueError(f'{stage}: the loss is {value} at step {step + 1}; lower the learning rate')
            nn.utils.clip_grad_norm_(parameters, 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            bar.set_postfix(loss=f'{value:.3f}')
            progress.seconds[stage] = time.perf_counter() - begin
            if (step + 1) % args.eval_every == 0 or step + 1 == steps:
                progress.save(stage, model, opt, step + 1, value)
                model.train()


def distil(teacher, student, new, kind, batch, progress):
    """Stage 1: only the new parameters, each layer by itself on the teacher's inputs; one layer's matrices at
    a time."""
    def loss(step):
        total = 0.0
        with torch.no_grad():
            for (block, *known), twin in zip(through(teacher, batch(step)[:, :-1]), student.blocks):
                if any(n.requires_grad for n in twin.parameters()):
                    with torch.enable_grad():
                        far = mismatch(kind, block, twin, *known, student.form)
                        if far.requires_grad:
                            far.backward()
                    total += far.item()
        return total / len(student.blocks)
    for n, p in student.named_parameters():
        p.requires_grad_(n in new)
    student.train()
    optimise(student, progress.args.distil_lr, progress.args.distil_steps, loss, f'distil ({kind})', progress)
    for p in student.parameters():
        p.requires_grad_(True)


class LoRA(nn.Module):
    """W + B A / r * 16, A (r, in) random, B (out, r) zero at first. Hu 2021, arXiv:2106.09685"""
    def __init__(self, W, rank):
        super().__init__()
        self.scale = 16 / rank
        self.A = nn.Parameter(torch.randn(rank, W.shape[1], device=W.device) / W.shape[1] ** 0.5)
        self.B = nn.Parameter(torch.zeros(W.shape[0], rank, device=W.device))

    def forward(self, W):
        return W + self.scale * self.B @ self.A


def finetune(model, steps, lr, batch, stage, progress, teacher=None, lora=0, new=()):
    """Stage 2: the next token, or the teacher's distribution of it; all weights, or what is new and LoRA on
    q, k, v and output."""
    model.train()
    torch.manual_seed(progress.args.seed)           # for LoRA
    adapted = []
    if lora:
        for block in model.blocks:
            adapted += [block.mixer.qkv, block.mixer.proj]
        for n, p in model.named_parameters():
            p.requires_grad_(n in new)
        for linear in adapted:
            nn.utils.parametrize.register_parametrization(linear, 'weight', LoRA(linear.weight, lora))

    def loss(step):
        x = batch(step)
        logits = model(x[:, :-1])[0].flatten(0, 1)
        if teacher is None:
            value = F.cross_entropy(logits, x[:, 1:].flatten())
        else:
            with torch.no_grad():
                wanted = teacher(x[:, :-1])[0].flatten(0, 1).log_softmax(-1)
            value = F.kl_div(logits.log_softmax(-1), wanted, reduction='batchmean', log_target=True)
        value.backward()
        return value.item()
    optimise(model, lr, steps, loss, stage, progress)
    for linear in adapted:
        nn.utils.parametrize.remove_parametrizations(linear, 'weight')
    for p in model.parameters():
        p.requires_grad_(True)


# ---- proof -------------------------------------------------------------------------------------------------
@torch.no_grad()
def nats(model, val, args, T, device):
    """Mean of -log p over evenly spaced rows of validation text, each read from an empty state."""
    model.eval()
    begin, total = np.linspace(0, len(val) - T - 1, args.eval_rows).astype(int), 0.0
    for some in np.array_split(begin, max(1, len(begin) // 8)):
        x = torch.from_numpy(np.stack([val[i:i + T + 1] for i in some]).astype(np.int64)).to(device)
        logits = model(x[:, :-1])[0].flatten(0, 1)
        total += F.cross_entropy(logits, x[:, 1:].flatten(), reduction='sum').item()
    return total / (len(begin) * T)


@torch.no_grad()
def fidelity(teacher, student, x):
    """Of each swapped layer with weights, on the teacher's inputs: divergence from the teacher's, entropies,
    and the share of pairs of keys whose order by q.k the weights keep (Zhang 2024 sec. 3)."""
    found, draw = [], torch.Generator().manual_seed(0)
    if x.shape[1] < 2:
        return []                   # no pairs
    for i, ((block, _, u, q, k, *_), twin) in enumerate(zip(through(teacher, x), student.blocks)):
        if twin.mixer.memory.rule.keeps == 'all' or not has_weights(twin.mixer):
            continue
        a, w = weights(block.mixer, u, q, k), weights(twin.mixer, u, q, k).clamp(min=1e-12)
        T = a.shape[-1]
        t = torch.arange(1, T, device=x.device)
        pair = [(torch.rand(T - 1, generator=draw).to(x.device) * (t + 1)).long() for _ in 'ij']
        order = [(y[:, :, t, pair[0]] - y[:, :, t, pair[1]]).sign() for y in (q @ k.mT, w)]
        differ = (pair[0] != pair[1]).expand_as(order[0])
        log = lambda y: y.clamp(min=1e-12).log()
        found.append({'layer': i + 1, 'KL to teacher': (a * (log(a) - log(w))).sum(-1).mean().item(),
                      'entropy of teacher': -(a * log(a)).sum(-1).mean().item(),
                      'entropy': -(w * log(w)).sum(-1).mean().item(),
                      'order kept': (order[0] == order[1])[differ].float().mean().item()})
    return found


def a_teacher(make=True):
    """out/ckpt.safetensors if it can be one, else out/teacher/ckpt.safetensors, made if need be."""
    first, path = Args.from_, 'out/teacher/ckpt.safetensors'
    if os.path.exists(first):
        meta = read(first)[1]
        keeps = config_of(first, meta).keeps()
        if 'all' in keeps and keeps <= {None, 'all'} and 'row' not in meta.get('data', {}):
            return first
    if not os.path.exists(path) and not make:
        raise ValueError(f'no softmax model in out/: python train.py {TEACHER} --out=out/teacher makes one')
    if not os.path.exists(path):
        command = f'train.py {TEACHER} --out=out/teacher'.split()
        print(f'no softmax model in out/: python {" ".join(command)}', flush=True)
        command[0] = os.path.join(os.path.dirname(os.path.abspath(__file__)), command[0])
        if subprocess.run([sys.executable, *command]).returncode:
            raise ValueError('the teacher could not be trained')
    return path


def settings(argv):
    """Flags, and with --resume those of the conversion that was stopped. -> args, the student's flags"""
    given, changes = parse(argv, __doc__, Args, Student)
    if given.get('resume'):
        stages = Progress(Args(**given)).stages()
        if not stages:
            raise ValueError(f'--resume: no conversion was stopped in {given.get("out", Args.out)}')
        kept = read(stages[0])[1]
        known = {**kept['args'], **kept['changes'], 'resume': True}
        for name, value in {**given, **changes}.items():
            if known.get(name) != value and name not in ('out', 'device'):
                raise ValueError(f'--{name.strip("_")}={value}: the run began with {known.get(name)!r}; drop '
                                 'the flag, or --resume')
        return Args(**{**kept['args'], **given}), kept['changes']
    if not {'rule', 'layers', 'phi'} & changes.keys():
        changes |= dict(rule='sum', phi='hedgehog')
    return Args(**{'from_': '', **given}), {'rule': 'sum', **changes}


@script
def main(argv):
    args, changes = settings(argv)
    device = pick_device(args.device)
    args.from_ = args.from_ or a_teacher()
    teacher, meta = pretrained(args.from_, args.revision, device)
    if teacher.config.keeps() - {None, 'all'}:
        raise ValueError(f'{args.from_}: its layers keep few rows, {",".join(teacher.config.rules())}; a '
                         'teacher keeps all')
    if 'all' not in teacher.config.keeps():
        raise ValueError(f'{args.from_}: has no softmax layers, only {",".join(teacher.config.rules())}; '
                         'python train.py --rule=softmax makes a teacher')
    T = min(args.row or teacher.config.block_size, teacher.config.block_size)
    train, val, data, source = prepare.load_like(args.from_, meta, args.data, T)
    torch.manual_seed(args.seed)
    student, new = swap(teacher, changes)
    if args.fold:
        can_fold(student)
    kinds = [has_weights(b.mixer) for i, b in enumerate(student.blocks)
             if any(n.startswith(f'blocks.{i}.') for n in new)]
    kind = args.distil if args.distil != 'auto' else 'ce' if kinds and all(kinds) else 'mse'
    if kind == 'ce' and not all(kinds):
        raise ValueError('--distil=ce compares attention weights, and this rule has none: take mse or hidden')
    batch = lambda offset: lambda step: rows(train, args, T, offset + step, device)
    per_byte = val.size / data['val']['bytes'] / math.log(2)
    found, base = [], nats(teacher, val, args, T, device)

    def note(name, model, steps=0, stage=''):
        loss = base if model is teacher else nats(model, val, args, T, device)
        found.append({'model': name, 'perplexity': math.exp(min(loss, 80)), 'bits per byte': loss * per_byte,
                      'recovered': math.exp(base - loss), 'tokens': steps * args.batch_size * T,
                      'minutes': round(progress.seconds.get(stage, 0) / 60, 2)})
        print(f'{name}: perplexity {found[-1]["perplexity"]:.4g}, recovered {math.exp(base - loss):.1%}')
    score = lambda model: {'perplexity': math.exp(min(nats(model, val, args, T, device), 80))}
    made_from = {'teacher': meta.get('digest'), 'text': data['train']['sha256']}
    flags = {'args': dataclasses.asdict(args), 'changes': changes, 'made_from': made_from}
    progress = Progress(args, flags, score)
    os.makedirs(args.out, exist_ok=True)
    if not args.resume:
        progress.forget()
        open(os.path.join(args.out, 'log.jsonl'), 'w').close()
    parameters = dict(student.named_parameters())
    print(f'{args.from_} -> {",".join(student.config.rules())}; {source}, rows of {T}; of '
          f'{sum(p.numel() for p in parameters.values()):,} parameters '
          f'{sum(parameters[n].numel() for n in new if n in parameters):,} are new')
    note('teacher', teacher)
    note('swapped', student)
    learns = [n for n in new if n in parameters]
    if kind != 'none' and args.distil_steps and learns:
        distil(teacher, student, new, kind, batch(0), progress)
        note(f'distilled ({kind})', student, args.distil_steps, f'distil ({kind})')
    heads = fidelity(teacher, student, torch.from_numpy(np.stack([val[:T]]).astype(np.int64)).to(device))
    student = copy.deepcopy(student)                            # until here its weights were the teacher's
    if args.steps:
        kl = teacher if args.loss == 'kl' else None
        finetune(student, args.steps, args.lr, batch(args.distil_steps), 'fine-tune', progress, kl, args.lora,
                 new)
        note('fine-tuned', student, args.steps, 'fine-tune')
    plain = student.config
    if args.fold:
        student = fold(student)
    save(os.path.join(args.out, 'ckpt.safetensors'), student,
         {'step': args.steps, 'data': meta['data'], 'args': {'data': source}, 'from': args.from_})
    if args.export:
        export(student, args.export)
    sizes = []
    with torch.no_grad():
        state = student.eval()(torch.zeros(1, 1, dtype=torch.long, device=device))[1]
    fixed, c, size = 'all' not in student.config.keeps(), teacher.config, state_bytes(state)
    for n in (1024, 8192, 131072):
        kv = 2 * 4 * c.n_layer * (c.n_kv_head or c.n_head) * (c.n_embd // c.n_head) * n
        sizes.append({'tokens': n, 'state bytes': size if fixed else None, 'KV cache bytes': kv,
                      'times smaller': kv / size if fixed else None})
    if args.controls and args.steps:
        twin = copy.deepcopy(teacher)
        finetune(twin, args.steps, args.lr, batch(args.distil_steps), 'control: teacher', progress,
                 lora=args.lora)
        note('control: teacher fine-tuned', twin, args.steps, 'control: teacher')
        torch.manual_seed(args.seed)
        anew = GPT(plain).to(device)
        steps = args.steps + (args.distil_steps if learns and kind != 'none' else 0)
        finetune(anew, steps, 4e-3, batch(0), 'control: from scratch', progress)
        note('control: student from scratch', anew, steps, 'control: from scratch')
    print()
    for rows_ in (found, heads, sizes):
        if rows_:
            table(rows_)
            print()
    with open(os.path.join(args.out, 'convert.json'), 'w') as f:
        json.dump(dict(args=dataclasses.asdict(args), config=dataclasses.asdict(student.config), distil=kind,
                       table=found, layers=heads, state=sizes), f, indent=1)
    progress.forget()
    print(f'{args.out}/convert.json has these tables; python sample.py --init={args.out}/ckpt.safetensors')


if __name__ == '__main__':
    sys.exit(main())
