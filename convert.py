"""Turn a pretrained transformer into an RNN: swap its attention, train, report what was recovered of it.

    python convert.py                       --recipe=pure: one matrix per head. Converts out/ckpt.safetensors,
                                            of train.py --rule=softmax --n_head=4
    python convert.py --recipe=hybrid       a matrix and 64 cached tokens (LoLCATs, arXiv:2410.10254)
    python convert.py --recipe=hedgehog     Zhang 2024; also t2r: Kasai 2021; decay: Mao 2022
    python convert.py --from=gpt2 --data=wikitext2          GPT-2 or Llama weights from the hub
    python convert.py --from=FOLDER --data=my.txt           your own text, in the teacher's tokens
    python convert.py --from=OWNER/NAME --recipe=hedgehog --lora=8 --data=dialogues.txt:summaries.txt
                                            pairs: a line of one file, then of the other
    python convert.py --from=out/softmax-on-recall/ckpt.safetensors         a task: reports accuracy, too
    python sample.py --init=out/convert/ckpt.safetensors

A model of train.py's default size takes six minutes on one core, controls included. The steps, in order:

    swap         Make a student: the teacher's weights, but other rules in place of softmax. Feature maps and
                 gates are new parameters. The decays begin so slow that a head remembers as far as its
                 teacher sees.
    distil       Stage 1 trains the new parameters, or whole mixers (attention layers). Each layer learns to
                 imitate the teacher's layer on the teacher's inputs.
    fine-tune    Stage 2 trains all weights, or LoRA, on the teacher's distribution or on the next token.
    fold         (--fold) Multiply T2R's feature map into W_q and W_k.
    controls     Train the teacher for as many more steps, at two learning rates, and train the student from
                 scratch: what these steps give without a teacher to imitate.

What is recovered is the teacher's perplexity over the student's (of a task: the student's accuracy over the
teacher's). A recipe is a list of flags (RECIPES). Flags that you give override it. Writes ckpt.safetensors,
log.jsonl, result.json (the student's figures) and convert.json into --out. convert.json has the tables, and
the attention weights of one query. Columns: `recovered a byte`, the same per byte of text; `of the tuned`,
against the better of the two teachers trained on; `order kept`, how often weights rank two keys as q.k does.
"""
import copy
import dataclasses
import glob
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, parametrize

from data import prepare
from data.flags import briefly, flag, known, parse, picked, plural, refuse, typed
from data.weights import is_state, read_tensors, to_folder, weights_digest
from fastweight import RULES
from model import (GPT, SOURCE_RULES, bias_of, can_become_an_rnn, fill, idle, kl, load, pick_device, save,
                   state_bytes, subset)
from train import (QUIET, Rows, adamw, begin_step, bits_a_nat, begin_log, blocks, commit, lies_in, log_of,
                   pack_optimiser, predict, rows, say, set_threads, table, tell_saved, tell_step,
                   unpack_optimiser)

# Flags per recipe; `Args` explains them. The papers' recipes use their order of stages and losses, and their
# kind of feature map (README, Limits). pure and hybrid first imitate the teacher's hidden states by layer.
RECIPES = {
    'pure': '--rule=gla-beta --distil=hidden --learn=mixer --distil_lr=1e-2 --faster=5',
    'hybrid': '--rule=window --cache=64 --overflow=gla-beta:hedgehog:4 --distil=hidden --distil_lr=1e-3 '
              '--faster=5 --lr=2e-4',
    'hedgehog': '--rule=sum --phi=hedgehog:listing --distil=ce --loss=next',
    't2r': '--rule=sum --phi=t2r --distil=none --loss=next',
    'decay': '--rule=decay --distil=none --loss=next'}
PLACES = 'self', 'cross', 'encoder'     # the attention layers of a translator; self: its decoder's
LONG = 1024                                             # most tokens per row without --row: T x T tensors
SCRATCH_LR = 4e-3                                       # learning rate of the student from scratch
TEACHER_LRS = 1e-3, 1e-4                                # learning rates of the teacher that trains on


@dataclass
class Args:
    recipe: str = flag('pure', 'what replaces softmax, and how it is trained: a list of flags; flags that '
                               'you give override it', list(RECIPES))
    from_: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2, -medium, ...; OWNER/NAME; folder', path=True)
    revision: str = flag('main', 'branch, tag or commit on the hub')
    data: str = flag('', 'text, task or pairs to train on; default: those of the teacher', path=True)
    out: str = flag('out/convert', 'folder for the checkpoint, tables and log', path=True)
    swap: str = flag(','.join(PLACES), 'in a translator: which attention to swap')
    distil: str = flag('auto', 'stage 1, layer by layer: match attention weights (ce), outputs (mse) or '
                               'hidden states; auto: ce if the student has weights, else mse',
                       ['auto', 'ce', 'mse', 'hidden', 'none'])
    learn: str = flag('new', 'stage 1 trains the new parameters or, with --distil=hidden, whole mixers',
                      ['new', 'mixer'])
    distil_steps: int = flag(300, 'steps of stage 1', low=0, high=10 ** 9)
    distil_lr: float = flag(1e-2, 'peak learning rate of stage 1', low=0, high=100)
    steps: int = flag(1000, 'steps of stage 2, fine-tuning', low=0, high=10 ** 9)
    lr: float = flag(None, 'peak learning rate of stage 2; default: 0.25 / width', low=0, high=100)
    faster: float = flag(1.0, 'stage 2: a factor on the learning rate of new parameters', low=0, high=1000)
    loss: str = flag('kl', 'stage 2: predict the next token, or match the teacher (KL)', ['next', 'kl'])
    lora: int = flag(0, 'rank of LoRA on W_q, W_k, W_v, W_o in stage 2; 0: all weights', low=0, high=2 ** 17)
    batch_size: int = flag(4, 'rows per step', low=1, high=2 ** 20)
    row: int = flag(0, 'tokens per row; 0: as in the teacher\'s training, at most 1,024', low=0,
                    high=2 ** 24)
    eval_rows: int = flag(64, 'validation rows for each evaluation', low=1, high=10 ** 9)
    export: str = flag('', 'only write the model of --from into this folder, for transformers', path=True)
    fold: bool = flag(False, 'multiply phi into W_q and W_k at the end; needs --phi=t2r, no rope')
    controls: bool = flag(True, 'also train the teacher for as many steps, at two rates, and the student '
                                'from scratch')
    eval_every: int = flag(250, 'steps between evaluations; each also saves, for --resume', low=1,
                           high=10 ** 9)
    resume: bool = flag(False, 'continue the stopped conversion in --out')
    seed: int = flag(0, 'seed of new weights and the data order', low=0, high=2 ** 32 - 1)
    device: str = flag('auto', 'auto, cpu, cuda')
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial; for a large model all', low=1,
                        high=1024)


Student = subset('layers', 'phi', 'norm', 'out_norm', 'beta_max', 'cache', 'sinks', 'overflow',
                 rule=flag('sum', 'what replaces softmax', list(RULES)))
HELP = '\n'.join([
    __doc__ or '',
    'Recipes. Their flags replace the defaults below. With another --rule, only their training flags do:',
    *(f'    {name:<12} {row}' for name, row in RECIPES.items())])


# ---- the swap ----------------------------------------------------------------------------------------------
def swap(teacher, changes, places=PLACES):
    """Make a GPT with other rules and the teacher's weights -> the student, the names of its new parameters.
    The weights are shared with the teacher, not copied, until they are trained. changes: flags of `Student`;
    places: which attention of a translator to swap"""
    old = teacher.config
    pos = 'rope' if old.turns() else old.pos                # W_q and W_k were learned with rope: keep it
    student = GPT(dataclasses.replace(old, pos=pos, **rules_after(old, changes, places)))
    twins = student.mixers()
    for name, mixer in teacher.mixers().items():
        memory = mixer.memory
        twin = twins[name].memory
        stays = twin.rule.matrix and memory.rule.matrix and (twin.map, twin.norm) == (memory.map, memory.norm)
        if memory.rule.matrix and not stays:
            raise ValueError(f'{name} of the teacher has fast weights already, with --phi={memory.map} '
                             f'--norm={memory.norm}, which are flags of all layers: give these')
    if student.config.all_rules == old.all_rules:
        flags = f'--layers={old.layers}' if old.layers else f'--rule={old.rule}'
        raise ValueError(f'{flags}: nothing of the teacher would change')
    missing, extra = fill(student, teacher.state_dict(),
                          'the teacher\'s weights do not fit these rules and maps',
                          strict=False, assign=True)
    if extra:
        raise ValueError(f'the teacher has {extra[0]}, which no rule of the student has room for')
    parameters = dict(student.named_parameters())
    student.to(teacher.embed.weight.device).eval()
    return student, parameters.keys() & set(missing)


def rules_after(old, changes, places):
    """-> the changes, with the rule of every layer added. --rule replaces softmax in the given places; other
    rules stay. Softmax over a source also stays if --rule caches few tokens, since a source is read as a
    whole."""
    rule = changes.get('rule', old.rule)
    if not old.encoder and set(places) != set(PLACES):
        raise ValueError(f'--swap={",".join(places)}: the teacher has no encoder, so there is but one place')
    if 'self' not in places and rule not in SOURCE_RULES:
        raise ValueError(f'--swap={",".join(places)}: {rule} keeps few rows, but a source is read whole; '
                         'take another rule, or self as well')
    layers = old.rules
    if 'self' in places:
        layers = [rule if name == 'softmax' else name for name in layers]
    rules = {'layers': ','.join(layers)}
    if len(set(layers)) == 1:
        rules = {'rule': layers[0], 'layers': ''}
    for place, field, name in zip(('encoder', 'cross'), ('encoder_rule', 'cross'), old.source_rules):
        swaps = place in places and name == 'softmax' and rule in SOURCE_RULES
        rules[field] = rule if swaps else name
    if 'self' not in places:
        changes = {**changes, 'rule': old.rule}
    return {**rules, **changes}


def out_of_reach(memory):
    """How many steps old a key is when it enters the matrix: 0, or its age when the cache evicts it."""
    if memory.overflow is None:
        return 0
    return memory.cache - memory.sinks * (memory.rule.keeps == 'sink')


def keys_in_matrix(memory, T, device):
    """-> (T, T): whether query t finds key s in the matrix. Without a cache, as in an encoder, always."""
    if memory.overflow is None:
        return torch.ones(T, T, dtype=torch.bool, device=device)
    t = torch.arange(T, device=device)
    in_matrix = t[:, None] - t >= out_of_reach(memory)
    if memory.rule.keeps == 'sink':
        in_matrix = in_matrix & (t >= memory.sinks)
    return in_matrix


@torch.no_grad()
def begin_as(teacher, student, x):
    """Initialise new parameters from the teacher's attention on the tokens x (B, T). `remember` sets the
    gates by how far back the heads look. Beside a cache, `balance` sets the weight of the keys that only the
    matrix has. If T is too short for the cache to evict any key, a layer is left as it is."""
    for seen in teacher.through(x):
        memory = student.get_submodule(seen.name).memory
        swapped = seen.mixer.memory.rule.keeps              # the teacher has softmax there
        matrix = memory.rule.matrix or memory.overflow is not None
        if seen.crosses or not (swapped and matrix):        # positions of two texts have no distance
            continue
        T = seen.q.shape[2]
        if out_of_reach(memory) < T:
            in_matrix = keys_in_matrix(memory, T, x.device)
            remember(seen, memory, in_matrix)
            if memory.overflow is not None:
                balance(seen, memory, in_matrix)


def remember(seen, memory, in_matrix):
    """Set the gates so that the matrix remembers as far back as the teacher's head looks. A channel with
    f = 1 - 1/tau remembers about tau steps. The n channels of a head get different tau: for channel i it is
    the distance within which a share (i + 1/2) / n of the head's attention falls. Only attention to keys that
    are in the matrix counts, and beside a cache tau counts from the eviction of a key. W, which makes gates
    depend on the token, begins as 0.
    seen: what GPT.through yields for the teacher; in_matrix: the result of `keys_in_matrix`"""
    gates = (memory.overflow or memory).gates
    biases = [getattr(gates, name) for name in ('bias_f', 'bias_z') if hasattr(gates, name)]    # (H, 1, n)
    if not biases:
        return
    a = seen.weights(seen.mixer)                            # (B, H, T, T)
    if seen.real is not None:
        a = a * seen.real[:, None, :, None]
    t = torch.arange(len(in_matrix), device=a.device)
    distance = (t[:, None] - t).abs()
    weight = a.new_zeros(a.shape[1], len(t))                # (H, T): attention per distance
    weight.index_add_(1, distance.flatten(), (a.sum(0) * in_matrix).flatten(1))
    weight = weight.unflatten(0, (len(biases[0]), -1)).sum(1)           # heads that share a matrix: (G, T)
    total = weight.sum(1, keepdim=True).clamp(min=1e-30)
    nearer = weight.cumsum(1) / total
    for bias in biases:
        n = bias.shape[-1]
        wanted = (torch.arange(n, device=a.device) + 0.5) / n
        steps = torch.searchsorted(nearer, wanted.expand(len(nearer), n).contiguous()) + 1
        tau = steps - out_of_reach(memory)
        bias.copy_(bias_of(tau.clamp(min=1.2), gates.rule.rate or 1.0)[:, None])
    gates.proj.weight.zero_()


def balance(seen, memory, in_matrix):
    """Give the matrix beside a cache the weight that the teacher gives to the keys in it: the sum of their
    e^(q.k_s / sqrt(d)). The matrix itself computes another mass for them. Per head, the bias of log_mass
    becomes the log of the ratio, averaged over steps. seen, in_matrix: as for `remember`"""
    scores = seen.scores.masked_fill(~in_matrix, -math.inf)
    wanted = scores.logsumexp(-1, keepdim=True)             # (B, H, T, 1)
    _, _, went, _ = memory.attend_and_evict(seen.q, seen.k, seen.v)
    _, mass, _ = memory.overflow.take(seen.q, went, {})
    steps = in_matrix.any(-1)                               # those with keys in the matrix
    log_mass = mass[:, :, steps].clamp(min=1e-30).log()
    memory.log_mass.bias.copy_((wanted[:, :, steps] - log_mass).mean((0, 2, 3)))


# ---- stage 1: layer by layer -------------------------------------------------------------------------------
def changed(student, new):
    """The student's mixers that have new parameters, by name."""
    return {name: mixer for name, mixer in student.mixers().items()
            if any(parameter.startswith(f'{name}.') for parameter in new)}


def what_to_match(wish, student, new):
    """-> the kind of stage 1. `auto` becomes ce if all new mixers have attention weights, else mse. Without
    new parameters it is `none`."""
    if not new:
        return 'none'
    comparable = all(mixer.has_weights for mixer in changed(student, new).values())
    if wish == 'ce' and not comparable:
        raise ValueError('--distil=ce compares attention weights, and this rule has none: take mse or hidden')
    if wish == 'auto':
        wish = 'ce' if comparable else 'mse'
    return wish


def learners(student, new, which):
    """The names of the parameters that stage 1 trains: the new ones or, with `mixer`, all parameters of
    mixers that have new ones."""
    if which == 'new':
        return new
    mixers = tuple(f'{name}.' for name in changed(student, new))
    return {name for name, _ in student.named_parameters() if name.startswith(mixers)}


def unshare(student, names):
    """Copy what training will change, so that the teacher keeps its own: the parameters of these names, and
    random features, which are redrawn. With LoRA the other weights stay shared and need no memory."""
    for name, p in student.named_parameters():
        if name in names:
            p.data = p.data.clone()
    for x in student.buffers():
        x.data = x.data.clone()


def mismatch(kind, seen, student):
    """The loss of stage 1: a scalar that compares a mixer (attention layer) of the student, or for `hidden` a
    block, with the teacher's, on the teacher's input. Mean over the positions without padding.
        hidden    mean square error of the block's output (MOHAWK, arXiv:2408.10189)
        ce        cross entropy -sum_s a_ts log w_ts of the teacher's weights a, the student's w (Zhang 2024,
                  eq. 4)
        mse       mean square error of the attention output, over the teacher's variance (LoLCATs,
                  arXiv:2410.10254)
    seen: what GPT.through yields for the teacher"""
    twin = student.get_submodule(seen.name)
    real = slice(None)
    if seen.real is not None:
        real = seen.real
    if kind == 'hidden':
        block = student.get_submodule(seen.layer)
        state = {}                                          # starts empty
        t = 0
        if block.cross is not None:
            state['cross'] = block.cross.write(seen.source, seen.encoder_real)
            t = block.cross.begin
        error = block(seen.x, state, t, seen.encoder_real)[0] - seen.y
        return error.square().mean(-1)[real].mean()
    if kind == 'ce':
        a = seen.weights(seen.mixer)
        w = seen.weights(twin)
        return -(a * w.clamp(min=1e-8).log()).sum(-1).mean(1)[real].mean()
    wanted = seen.o                                          # (B, H, T, head_dim)
    output = seen.outputs(twin)
    if twin.out_norm is not None:
        output = twin.out_norm(output)
    error = (output - wanted).square().mean((1, 3))
    return error[real].mean() / wanted.transpose(1, 2)[real].var()


def distil(run, teacher, student, names, kind, steps, lr):
    """Stage 1: train the parameters of these names on `mismatch` of this kind. Every layer gets the teacher's
    input, so the layers are independent. We run backward one layer at a time, and so hold the (T, T) matrices
    of only one layer."""
    def loss(step):
        x, _ = run.data.batch(step)
        total = 0.0
        many = 0
        with torch.no_grad():
            for seen in teacher.through(x):
                if kind == 'hidden' and seen.crosses:       # its layer has been compared already
                    continue
                many += 1
                if not any(p.requires_grad for p in student.get_submodule(seen.layer).parameters()):
                    continue
                with torch.enable_grad():
                    far = mismatch(kind, seen, student)
                if far.requires_grad:                       # some kinds of loss do not use all parameters
                    far.backward()
                total = total + far.detach()
        return (total / many).reshape(1)

    unshare(student, names)
    for name, p in student.named_parameters():
        p.requires_grad_(name in names)
    run.train_stage(f'distil ({kind})', student, loss, steps, lr)
    student.requires_grad_(True)


# ---- stage 2: the whole model ------------------------------------------------------------------------------
class LoRA(nn.Module):
    """Replaces W by W + B A * 16 / r. A (r, in) begins random, B (out, r) begins as zero. Hu 2021,
    arXiv:2106.09685. W may stack several projections; sizes: the rows of each, which gets its own A and B"""
    def __init__(self, W, rank, sizes):
        super().__init__()
        self.scale = 16 / rank
        self.A = nn.ParameterList()
        self.B = nn.ParameterList()
        for size in sizes:
            self.A.append(torch.randn(rank, W.shape[1], device=W.device) / W.shape[1] ** 0.5)
            self.B.append(torch.zeros(size, rank, device=W.device))

    def forward(self, W):
        return W + torch.cat([self.scale * B @ A for A, B in zip(self.A, self.B)])


def adapt(model, rank, new):
    """Put LoRA on W_q, W_k, W_v and W_o of every mixer -> the linear layers that have it. Of the other
    parameters, only those in `new` will learn."""
    for name, p in model.named_parameters():
        p.requires_grad_(name in new)
    adapted = []
    for mixer in model.mixers().values():
        for linear, sizes in (mixer.qkv, mixer.sizes), (mixer.proj, [len(mixer.proj.weight)]):
            parametrize.register_parametrization(linear, 'weight', LoRA(linear.weight, rank, sizes))
            adapted.append(linear)
    return adapted


def merge_lora(adapted):
    """Merge LoRA into the weights: W becomes W + B A * 16 / r."""
    for linear in adapted:
        parametrize.remove_parametrizations(linear, 'weight')


def finetune(run, stage, model, steps, lr, after=0, teacher=None, lora=0, new=()):
    """Stage 2 and the controls: train on the targets or, with a teacher, on its distribution at the same
    positions, KL(teacher || model). All weights learn. With lora > 0, only LoRA of that rank and the
    parameters in `new` learn. after: steps of the stage before, so that other rows are drawn"""
    def loss(step):
        if teacher is None:
            return run.data.learn(model, [None], after + step)
        x, y = run.data.batch(after + step)
        logits, _, _ = predict(model, x, y, None, run.data.meta)
        with torch.no_grad():
            wanted = predict(teacher, x, y, None, run.data.meta)[0].log_softmax(-1)
        value = F.kl_div(logits.log_softmax(-1), wanted, reduction='batchmean', log_target=True)
        value.backward()
        return value.detach().reshape(1)

    torch.manual_seed(run.args.seed)                        # for LoRA's A
    adapted = []
    if lora:
        adapted = adapt(model, lora, new)
    run.train_stage(stage, model, loss, steps, lr, new)
    merge_lora(adapted)
    model.requires_grad_(True)


# ---- fold --------------------------------------------------------------------------------------------------
def can_fold(model):
    """-> the features per head. ValueError unless a T2R map directly follows W_q and W_k in every layer."""
    c = model.config
    memories = [mixer.memory for mixer in model.mixers().values()]
    folding = [memory for memory in memories if memory.rule.keeps != 'all']     # softmax is not folded
    is_t2r = c.phi.partition(':')[0] in ('t2r', 't2r-scaled')
    if not is_t2r or c.turns() or {memory.rule.keeps for memory in folding} != {None}:
        raise ValueError('--fold needs --phi=t2r where softmax was, and no rope between W_q and phi')
    return folding[0].phi.feature_dim


def composed(phi, linear):
    """A linear layer followed by T2R's W x + b, as one linear layer. phi has W (G, m, d) and b (G, 1, m).
    linear (H d, n_embd + 1), with its bias as the last column  ->  (H m, n_embd + 1)"""
    heads = linear.unflatten(0, (-1, phi.head_dim))
    product = phi.of_heads(phi.weight, heads[None]) @ heads
    product[..., -1:] += phi.of_heads(phi.bias, heads[None]).mT
    return product.flatten(0, 1)


@torch.no_grad()
def fold(model):
    """Multiply T2R's map phi(x) = relu(W x + b) into the projections -> a GPT with phi = relu. The features
    of q are relu((W W_q) x + (W b_q + b)), those of k likewise. This is exact. A head then has m channels of
    q and k, its features, and d of v. Kasai 2021. t2r-scaled reads q / sqrt(d), so we also scale
    W_q and b_q by d^(-1/2)."""
    m = can_fold(model)
    tensors = model.state_dict()
    for name, mixer in model.mixers().items():
        if mixer.memory.rule.keeps:
            continue
        phi = mixer.memory.phi
        W = mixer.qkv.weight
        bias = mixer.qkv.bias
        if bias is None:
            bias = W.new_zeros(len(W))
        q, k, v = torch.cat([W, bias[:, None]], 1).split(mixer.sizes)
        if phi.scaled:
            q = q * phi.head_dim ** -0.5
        linear = torch.cat([composed(phi, q), composed(phi, k), v])
        tensors[f'{name}.qkv.weight'] = linear[:, :-1]
        tensors[f'{name}.qkv.bias'] = linear[:, -1]
    changes = {'phi': 'relu', 'bias': True, 'key_dim': m}
    folded = GPT(dataclasses.replace(model.config, **changes)).to(model.embed.weight).eval()
    for name, x in folded.state_dict().items():             # shares memory with the parameters
        if name.endswith('.bias'):
            x.zero_()
    folded.load_state_dict(tensors, strict=False)
    return folded


# ---- a conversion: its stages, its table -------------------------------------------------------------------
def share(row, base):
    """The share of a teacher that a model has recovered; row, base: their lines of the table. For a text it
    is the teacher's perplexity per token / the model's; else the model's accuracy / the teacher's. None if
    the teacher's accuracy is 0."""
    if 'bits per byte' in row:
        return base['perplexity'] / row['perplexity']
    if base['accuracy'] == 0:
        return None
    return row['accuracy'] / base['accuracy']


@dataclass
class Stage:
    """What the checkpoint of a stage says about the conversion that --resume continues."""
    args: dict
    changes: dict               # flags of `Student`
    made_from: dict
    step: int = known(0, 0, 10 ** 9)
    seconds: float = known(0.0, 0, 1e12)


def stages(out):
    """The checkpoints of a stopped conversion in folder `out`, one per stage."""
    paths = glob.glob(os.path.join(glob.escape(out), 'stage-*.safetensors'))
    return sorted(path for path in paths if not is_state(path))


def forget(paths):
    """Delete these checkpoints of stages."""
    for path in paths:
        os.remove(path)


def learned(model):
    """The part of its state_dict that a stage changes. The rest is still the teacher's."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in frozen}


class Conversion:
    """One conversion: its data, the lines of its table, log.jsonl, and a checkpoint per stage for --resume.
    about: what the checkpoints say: the flags, the digests of teacher and data, and the tokens"""
    def __init__(self, args, data, about):
        self.args = args
        self.data = data
        self.about = about
        self.seconds = {}                                   # per stage, including those before --resume
        self.table = []
        self.begin = blocks(len(data.val), data.T, data.meta, args.eval_rows)
        self.log, self.file = log_of(args)
        self.left = [] if args.resume else stages(args.out)
        if self.left:
            say(f'{args.out}: what a stopped conversion left there is replaced; --resume would go on with it')

    def columns_of(self, model, what):
        """Evaluate a model on --eval_rows rows, each from an empty state -> columns of the table. The teacher
        comes first. The share per byte is the share per token to the power tokens / bytes, so it looks better
        for the same model. Papers give it per GPT-2 token. what: the model's name"""
        loss, right = self.data.evaluate(model, self.begin, label=f'{what}, validation')
        meta = self.data.meta
        row = {'perplexity': math.exp(min(loss, 80)), 'accuracy': right}
        if 'row' not in meta:
            row['bits per byte'] = bits_a_nat(meta) * loss
        base = self.table[0] if self.table else row
        row['recovered'] = share(row, base)
        if 'row' not in meta:
            row['recovered a byte'] = row['recovered'] ** (meta['val']['tokens'] / meta['val']['bytes'])
        return row

    def note(self, name, model, *stages, steps=0):
        """Add a line to the table and print it: how good a model is after these stages and steps."""
        row = self.columns_of(model, name)
        seconds = sum(self.seconds[stage] for stage in stages)
        self.table.append({'model': name, **row, 'tokens': self.tokens_in(steps),
                           'minutes': round(seconds / 60, 2)})
        text = f'accuracy {row["accuracy"]:.1%}'
        if 'bits per byte' in row:
            text = (f'perplexity {row["perplexity"]:.4g}, recovered {row["recovered"]:.1%} a token, '
                    f'{row["recovered a byte"]:.1%} a byte')
        say(f'{name}: {text}')

    def closing(self, distilled, state):
        """-> the last line of the table, with more keys: the shares recovered after the swap and after stage
        1, the accuracy before the last stage, and the size of the state."""
        figures = dict(self.table[-1])
        figures['swapped'] = self.table[1]['recovered']
        figures['before'] = self.table[-2]['accuracy']
        if distilled:
            figures['stage 1'] = self.table[2]['recovered']
        if state:
            figures['state bytes'] = state[0]['state bytes']
        return figures

    def tokens_in(self, steps):
        """The number of tokens in so many steps."""
        return steps * self.args.batch_size * self.data.T

    def train_stage(self, stage, model, loss, steps, lr, new=()):
        """Train one stage or control, from where a stopped conversion left it. Parameters in `new` get
        --faster times this lr. loss(step) runs forward and backward -> the loss (1,). Resuming is exact on a
        CPU."""
        args = self.args
        path = f'{args.out}/stage-{re.sub("[^a-z0-9]+", "-", stage)}.safetensors'
        opt = adamw(model, lr, 0.0, self.data.device, new, args.faster)
        model.train()
        first = logged = 0
        if args.resume and os.path.exists(path):
            first = logged = self.restore_stage(stage, path, model, opt)
        began = last = time.perf_counter()
        before = self.seconds.get(stage, 0)
        for step in range(first, steps):
            begin_step(opt, step, steps, lr, args.seed)
            value = loss(step)                              # forward and backward
            norm = clip_grad_norm_(model.parameters(), 1.0)
            done = step + 1
            if not (norm.isfinite() and value.isfinite()):
                raise ValueError(f'{stage}: loss or gradient is not finite at step {done}; try a smaller '
                                 '--lr, or --distil_lr in stage 1')
            opt.step()
            model.zero_grad(set_to_none=True)
            now = time.perf_counter()
            self.seconds[stage] = before + now - began
            saves = done % args.eval_every == 0 or done == steps
            if saves or now - last > QUIET:
                ms = 1e3 * (now - last) / (done - logged)
                tell_step(self.log, self.data, steps, lr, done, value, norm, ms, f'{stage} | ')
                logged = done
                if saves:
                    self.save_stage(stage, path, model, opt, done)
                last = time.perf_counter()
        model.eval()

    def save_stage(self, stage, path, model, opt, step):
        """Write the checkpoint of a stage and a line of the log."""
        header = {**self.about, 'step': step, 'seconds': self.seconds[stage]}
        save(path, model, header, pack_optimiser(model, opt), learned(model))
        forget(set(self.left) - {path})                     # now that there is something in their place
        self.left = []
        self.log = begin_log(self.log, self.file)
        tell_saved('convert.py', self.args.out, path, step)
        row = {'stage': stage, 'step': step, 'tokens': self.tokens_in(step), **self.columns_of(model, stage)}
        print(json.dumps(row), file=self.log, flush=True)

    def restore_stage(self, stage, path, model, opt):
        """Restore model and optimiser of a stopped stage -> the steps already done."""
        tensors, meta = read_tensors(path)
        stopped = picked(Stage, meta, path)
        for key, digest in self.about['made_from'].items():
            if stopped.made_from.get(key) != digest:
                raise ValueError(f'--resume: the {key} is not what the run began with; start anew')
        weights = {name.removeprefix('model.'): x for name, x in tensors.items() if name.startswith('model.')}
        changing = learned(model)
        others = {name: x for name, x in model.state_dict().items() if name not in changing}
        fill(model, others | weights, f'{path}: holds the weights of another model')
        unpack_optimiser(model, opt, tensors, path)
        tell_saved('convert.py', self.args.out, path, stopped.step)
        self.seconds[stage] = stopped.seconds
        return stopped.step


def controls(run, teacher, config, distilled):
    """Run the controls, with as many steps as the student had in all and on the same rows. First we train the
    teacher on the next token, at two learning rates; the larger one harms a converged teacher. The student is
    compared with the better one, since an undertrained teacher is easy to match. Then we train a student from
    scratch. distilled: the steps of stage 1  ->  the better teacher's line of the table"""
    steps = distilled + run.args.steps
    for lr in TEACHER_LRS:
        twin = copy.deepcopy(teacher)
        stage = f'control: teacher, {lr:g}'
        finetune(run, stage, twin, steps, lr, lora=run.args.lora)
        run.note(stage, twin, stage, steps=steps)
    tuned = max(run.table[-len(TEACHER_LRS):], key=lambda row: row['recovered'] or 0)
    torch.manual_seed(run.args.seed)
    anew = GPT(config).to(run.data.device)
    stage = 'control: from scratch'
    finetune(run, stage, anew, steps, SCRATCH_LR)
    run.note('control: student from scratch', anew, stage, steps=steps)
    for row in run.table:
        row['of the tuned'] = share(row, tuned)
    return tuned


# ---- measurements ------------------------------------------------------------------------------------------
def order_kept(scores, w):
    """How often the weights w order two keys as q.k does, as a share. One random pair of keys is drawn per
    query but the first. Softmax keeps every order, and so should a map (Zhang 2024, sec. 3).
    scores, w (B, H, T, T)"""
    draw = torch.Generator().manual_seed(0)
    queries = scores.shape[-1] - 1
    t = torch.arange(1, queries + 1)
    i = (torch.rand(queries, generator=draw) * (t + 1)).long()
    j = (i + 1 + (torch.rand(queries, generator=draw) * t).long()) % (t + 1)        # different from i
    by_scores = (scores[:, :, t, i] - scores[:, :, t, j]).sign()
    by_weights = (w[:, :, t, i] - w[:, :, t, j]).sign()
    return (by_scores == by_weights).float().mean().item()


def entropy(w):
    """Mean of -sum_s w log w over queries, in nats. 0: each query looks at one key."""
    return -(w * w.clamp(min=1e-12).log()).sum(-1).mean().item()


@torch.no_grad()
def look(name, teacher, student, x):
    """Compare the attention of the swapped layers with the teacher's, on the teacher's inputs; x (1, T).
    ->  a line per layer that has attention weights: divergence, entropies, share of order kept;
        one query: the last one of the last such layer's first head, with keys sorted by q.k / sqrt(d): these
        scores, their softmax, and the student's weights under `name`. {} if there is no such layer"""
    lines = []
    query = {}
    for seen in teacher.through(x):
        twin = student.get_submodule(seen.name)
        if twin.memory.rule.keeps or not twin.has_weights or seen.crosses or seen.q.shape[2] < 2:
            continue
        a = seen.weights(seen.mixer)
        w = seen.weights(twin)
        scores = seen.scores
        lines.append({'model': name, 'layer': seen.layer, 'KL to teacher': kl(a, w).item(),
                      'entropy of teacher': entropy(a), 'entropy': entropy(w),
                      'order kept': order_kept(scores, w)})
        ordered, order = scores[0, 0, -1].sort()
        query = {'scores': ordered.tolist(), 'softmax': a[0, 0, -1, order].tolist(),
                 name: w[0, 0, -1, order].tolist()}
    return lines, query


@torch.no_grad()
def sizes(student, teacher):
    """Compare the student's state with the teacher's key/value cache after n tokens: bytes, in fp32."""
    c = teacher.config
    if not c.causal or c.source:                            # an encoder never decodes, a translator little
        return []
    heads = c.n_kv_head or c.n_head
    a_token = 2 * 4 * c.n_layer * heads * (c.n_embd // c.n_head)
    size = None                                             # None: a layer caches all tokens, so it grows
    if 'all' not in student.config.keeps():
        token = torch.zeros(1, 1, dtype=torch.long, device=student.embed.weight.device)
        size = state_bytes(student(token)[1])
    return [{'tokens': n, 'state bytes': size, 'KV cache bytes': a_token * n,
             'times smaller': a_token * n / size if size else None} for n in (1024, 8192, 131072)]


# ---- the run -----------------------------------------------------------------------------------------------
def settings(argv):
    """Merge the given flags with those of the recipe or, with --resume, of the stopped conversion -> args,
    the student's flags"""
    given, changes = parse(argv, HELP, Args, Student)
    if 'export' in given:
        refuse(not_exporting(given, changes))
    if given.get('resume'):
        way, kind = stopped(given, changes)
    else:
        way, kind = parse(RECIPES[given.get('recipe', Args.recipe)].split(), HELP, Args, Student)
        rule = changes.get('rule', kind['rule'])
        alike = rule == kind['rule'] or {rule, kind['rule']} == {'window', 'sink'}
        if 'layers' in changes or not alike:                # another rule: drop the recipe's map, norm, cache
            kind = {'rule': Student.rule}
    return Args(**{**way, **given}), {**kind, **changes}


def not_exporting(given, changes):
    """For `refuse`: flags that go beyond writing a folder."""
    yield not given['export'], '--export=: give a folder'
    for name in sorted(given.keys() | changes.keys()):
        yield name not in ('export', 'from_', 'revision', 'device', 'threads'), (
            f'--{name} means nothing: --export only writes the model of --from')


def stopped(given, changes):
    """The flags of the stopped conversion, as two dicts. Only --out and --device may differ."""
    out = given.get('out', Args.out)
    paths = stages(out)
    if not paths:
        raise ValueError(f'--resume: no conversion was stopped in --out={out} (one that was finished has '
                         'nothing to resume); start anew')
    path = paths[0]
    stage = picked(Stage, read_tensors(path)[1], path)
    typed(Args, stage.args, path)
    typed(Student, {**dataclasses.asdict(Student()), **stage.changes}, path)
    began = stage.args | stage.changes | {'resume': True}
    for name, value in (given | changes).items():
        if began.get(name) != value and name not in ('out', 'device'):
            raise ValueError(f'--{name.strip("_")}={value}: the run began with {began.get(name)!r}; leave '
                             'the flag out, or start anew without --resume')
    return stage.args, stage.changes


def cannot_teach(args, config):
    """For `refuse`: what is wrong with the flags or with a teacher of this config."""
    yield set(args.swap.split(',')) - set(PLACES), f'--swap={args.swap}: choose from {", ".join(PLACES)}'
    yield not can_become_an_rnn(config.all_rules), (
        f'{args.from_}: its layers are {briefly(config.all_rules)}; a teacher has softmax layers, and no '
        'other cache: python train.py --rule=softmax makes one')
    yield lies_in(args.from_, args.out), f'--out={args.out}: it holds the teacher; take another folder'
    yield args.row > config.block_size, (
        f'--row={args.row}: the teacher was trained on rows of {config.block_size}; give at most that')


def cannot_learn(student, data):
    """For `refuse`: the student's rows fit into the cache, so nothing is evicted into the matrix beside it.
    """
    T = data.T
    for mixer in student.mixers().values():
        memory = mixer.memory
        if memory.overflow is None:
            continue
        yield out_of_reach(memory) >= T, (
            f'--overflow={student.config.overflow}: rows of {T} tokens never leave the {memory.cache} that '
            'are kept; take a smaller --cache, or a longer --row')


def tell_start(args, name, data, student, new):
    """Print what is converted, and how many parameters are new. name: of the data"""
    counts = {name: p.numel() for name, p in student.named_parameters()}
    say(f'{args.from_} -> {briefly(student.config.all_rules)}; {name}, rows of {data.T}; '
        f'{plural(args.threads, "thread")}; of {sum(counts.values()):,} parameters '
        f'{sum(counts[name] for name in new):,} are new')


@prepare.script
def main(argv):
    args, changes = settings(argv)
    device = pick_device(args.device)
    teacher, meta = load(args.from_, device, args.revision)
    if args.export:
        to_folder(args.export, teacher.state_dict(), dataclasses.asdict(teacher.config), meta['data'])
        say(f'{args.export}: transformers reads this folder, and so does --from')
        return
    refuse(cannot_teach(args, teacher.config))
    T = args.row or min(teacher.config.block_size, LONG)
    train, val, of_data, name = prepare.for_model(args.from_, meta, args.data, T)
    data = Rows(train, val, of_data, of_data.get('row', T), device, args.batch_size, args.seed)
    torch.manual_seed(args.seed)
    student, new = swap(teacher, changes, args.swap.split(','))
    refuse(cannot_learn(student, data))
    refuse(idle({**changes, 'layers': ''}, student.config))     # --layers and --rule may both be given here
    begin_as(teacher, student, data.batch(0)[0])
    if args.lr is None:
        args.lr = 0.25 / student.config.n_embd              # about 5e-3 is good at width 64, 1e-3 at 192
    if args.fold:
        can_fold(student)
    kind = what_to_match(args.distil, student, new)
    set_threads(args, {}, student, data)
    args.threads = torch.get_num_threads()                  # the last bits depend on it; --resume keeps it

    made_from = {'teacher': weights_digest(teacher, meta), 'data': of_data['train'].get('sha256')}
    about = {'args': dataclasses.asdict(args), 'changes': changes, 'made_from': made_from,
             'data': meta['data']}
    run = Conversion(args, data, about)
    tell_start(args, name, data, student, new)
    first_row, _ = rows(val, run.begin[:1], data.T, of_data, device)
    run.note('teacher', teacher)
    run.note('swapped', student)
    layers, query = look('swapped', teacher, student, first_row)
    done = []                                               # names of finished stages
    distilled = args.distil_steps if kind != 'none' else 0  # steps of stage 1
    if distilled:
        distil(run, teacher, student, learners(student, new, args.learn), kind, distilled, args.distil_lr)
        done.append(f'distil ({kind})')
        run.note(f'distilled ({kind})', student, *done, steps=distilled)
        again, seen = look('distilled', teacher, student, first_row)
        layers += again
        query |= seen
    if args.steps:
        guide = teacher if args.loss == 'kl' else None
        unshare(student, new if args.lora else dict(student.named_parameters()))
        finetune(run, 'fine-tune', student, args.steps, args.lr, distilled, guide, args.lora, new)
        done.append('fine-tune')
        run.note('fine-tuned', student, *done, steps=distilled + args.steps)
    plain = student.config
    if args.fold:
        student = fold(student)
    save(f'{args.out}/ckpt.safetensors', student,
         {'step': args.steps, 'data': meta['data'], 'args': {'data': name}, 'from': args.from_})
    run.log = begin_log(run.log, run.file)
    state = sizes(student, teacher)
    figures = {**run.closing(distilled, state), 'commit': commit(), **dataclasses.asdict(args)}
    prepare.write_json(f'{args.out}/result.json', {**figures, **dataclasses.asdict(student.config)})
    tuned = None
    if args.controls and args.steps:
        tuned = controls(run, teacher, plain, distilled)

    print()
    for lines in run.table, layers, state:
        if lines:
            table(lines)
            print()
    prepare.write_json(f'{args.out}/convert.json', {
        'args': dataclasses.asdict(args), 'config': dataclasses.asdict(student.config), 'distil': kind,
        'table': run.table, 'tuned': tuned, 'layers': layers, 'query': query, 'state': state})
    source = ' --source="..."' if student.config.source else ''
    print(f'{args.out}/convert.json has these tables; python sample.py --init={args.out}/ckpt.safetensors'
          f'{source}')
    forget(stages(args.out))


if __name__ == '__main__':
    sys.exit(main())
