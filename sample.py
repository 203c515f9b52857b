"""Write text with a trained model: read the prompt in chunks, then take one step per token.

    python sample.py                                          256 tokens from out/ckpt.safetensors
    python sample.py --prompt="def main():" --tokens=1000 --temperature=0.7 --top_p=0.95
    cat model.py | python sample.py --prompt=- --save_state=out/read.safetensors     read once ...
    python sample.py --load_state=out/read.safetensors --prompt="class "             ... and go on from there
    python sample.py --init=FOLDER --chat --rule=h2o --cache=256           a conversation in constant memory
    python sample.py --init=out/softmax/ckpt.safetensors --rule=tova --cache=64      an RNN without training
    python sample.py --prompt=@FILE --lines                    of a classifier: the class of each line
    python sample.py --source="A man sleeps." --beam=4         a translation; @file: one of each line

If the model is a classifier, the prompt is classified: each class is printed with its probability. In a chat
(--chat) the model's own template frames what is said: --prompt, and each line of standard input if that is a
terminal or there is no --prompt. /help says what else can be typed. A text also ends where the model ends it.

What is written goes to standard output without the prompt: several texts below headings, translations one a
line. Messages go to standard error.

A state is everything that a model keeps of what it has read: for each layer a matrix S of fast weights, or
keys and values, and the last inputs of the convolutions. It does not grow with the text, except with softmax.
The file also keeps the last token, which the next step reads. A state file belongs to one model, by the
digest of its weights, to the flags that changed the model, and to --dtype.
"""
import base64
import dataclasses
import functools
import json
import os
import sys
import time
from dataclasses import dataclass

import torch

from common import files
from common.errors import note, script
from common.flags import flag, parse, plural, refuse
from common.machine import pick_device, take_threads
from common.watch import through
from common.weights import pack, read_tensors, state_bytes, unpack, weights_digest, write_tensors
from data import vocabulary
from fastweight import FLOOR, RULES, nearer
from model import CacheFlags, chosen_texts, idle, load, pick_forms, seen_by_k, spread

OFTEN = 'init prompt chat tokens temperature top_p rule cache dtype html'      # first in --help


@dataclass
class Args:
    init: str = flag('out/ckpt.safetensors', 'checkpoint; gpt2; OWNER/NAME; a folder', path=True)
    prompt: str = flag('', 'text, @file, - for standard input; empty: BOS, or a newline')
    chat: bool = flag(False, 'a conversation, in the chat template that the model brought')
    system: str = flag('', 'with --chat: a system prompt, or @file')
    lines: bool = flag(False, 'of a classifier: each line of --prompt is a text. For each, print its class, '
                              'probability and text, with tabs between; empty lines are left out')
    special: bool = flag(False, 'read special tokens in --prompt, such as <|im_end|>, not their letters')
    tokens: int = flag(256, 'tokens to write; of each answer', low=0, high=10 ** 12)
    samples: int = flag(1, 'texts written at once; of --load_state as many as it has', low=1, high=2 ** 16)
    temperature: float = flag(0.8, '0, or less than 1e-4, takes the likeliest token', low=0, high=100)
    top_k: int = flag(0, 'only the k likeliest tokens; 0 for all', low=0, high=2 ** 32)
    top_p: float = flag(1.0, 'only the likeliest tokens, whose probabilities add up to this', low=1e-6,
                        high=1)
    seed: int = flag(0, 'seed of the draws', low=0, high=2 ** 32 - 1)
    save_state: str = flag('', 'file to keep the state in, after prompt and sample', path=True)
    load_state: str = flag('', 'go on from this state', path=True)
    html: str = flag('', 'NAME.html: a page that shows what each memory kept of this text', path=True)
    source: str = flag('', 'for a translator: what to translate; @file: each of its lines')
    beam: int = flag(1, 'with --source: width of the beam; 1: greedy', low=1, high=1024)
    penalty: float = flag(0.6, 'with --beam: above 0, longer translations are preferred', low=0, high=100)
    device: str = flag('auto', 'auto, cpu, cuda, mps')
    threads: int = flag(None, 'CPU threads; default: the fastest, by trial', low=1, high=1024)
    dtype: str = flag('float32', 'of the weights', ['float32', 'bfloat16'])
    impl: str = flag('auto', 'form of the recurrence', ['auto', 'loop', 'chunk', 'fused'])


AT_ONCE = 64        # texts in a batch
LOOK_BACK = 16      # at most this many tokens wait to be printed; this many before them help to decode
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'assets', 'memory.html')
ON_A_PAGE = 2048    # tokens at most
RECORDED = {'q': 'q', 'k': 'k', 'v': 'v', 'write': 'w', 'erase': 'e',      # ours: the page's name
            'log_f': 'log_f', 'log_z': 'log_z',     # logs, as 16 bits cannot tell a decay near 1 from 1
            'log_q': 'log_q', 'log_k': 'log_k', 'share': 'share', 'q_first': 'q_first'}


def aside(text):
    """Print to standard error, beside what is written."""
    print(text, file=sys.stderr)


def task_of(args, config):
    """What such a model does with these flags. ValueError if it cannot do that."""
    if args.source and not config.source:
        raise ValueError(f'--source: {args.init} knows no pairs; python train.py --data=multi30k --encoder=3 '
                         'makes a model that does')
    if config.source:
        return 'translate'
    if not (config.causal or config.classes):
        raise ValueError(f'{args.init} is an encoder without classes: python train.py --init={args.init} '
                         '--data=mine.tsv teaches it those of lines 0<TAB>text')
    if config.classes:
        return 'classify'
    if args.lines:
        raise ValueError(f'--lines is for classifiers, and {args.init} writes a text: leave it out')
    if args.chat:
        return 'chat'
    return 'complete'


OF_WRITING = {'tokens', 'samples', 'temperature', 'top_k', 'top_p', 'seed', 'save_state',
             'load_state', 'html', 'chat', 'special'}
IGNORED = {         # flags without effect, for each result of `task_of`
    'translate': OF_WRITING | {'prompt', 'lines', 'system'},
    'classify': OF_WRITING | {'system', 'beam', 'penalty'},
    'chat': {'samples', 'save_state', 'load_state', 'special', 'beam', 'penalty'},
    'complete': {'system', 'beam', 'penalty'}}


def useless(task, given, args, config):
    """For `refuse`: flags that would be ignored, or do not go together."""
    for name in sorted(IGNORED[task] & given.keys()):
        yield True, f'--{name} means nothing when {args.init} is to {task}: leave it out'
    yield args.html and (args.samples > 1 or args.load_state), (
        '--html shows one text from its beginning: leave --samples and --load_state out')
    yield args.html and config.positions != 'true' and config.keeps() - {'window', 'sink', None}, (
        f'--html shows --positions={config.positions} of window and sink alone: leave --html out, or '
        '--positions if you gave it')


def made_with(args, model):
    """The flags that a state belongs to."""
    return {**dataclasses.asdict(model.config), 'dtype': args.dtype}


def read_state(args, model, meta):
    """A file of --save_state -> the last tokens of its texts (B, 1) and the state before them. ValueError if
    another model made it (by its digest), or this one with other flags."""
    path = args.load_state
    tensors, about = read_tensors(path)
    if about.get('model') != weights_digest(model, meta):
        raise ValueError(f'--load_state={path}: not a state of the model in {args.init} with this --dtype')
    for key, here in made_with(args, model).items():
        value = about['made_with'].get(key)
        if here != value:
            raise ValueError(f'--load_state={path}: made with {key}={value}; give that instead of {here}')
    last = tensors['last'].to(model.embed.weight.device)
    return last, unpack(tensors, last.device)


def keep_state(args, model, meta, last, state):
    """Write what `read_state` reads."""
    tensors = {name: x.clone() for name, x in pack(state).items()}          # layers may share some of them
    about = {'model': weights_digest(model, meta), 'made_with': made_with(args, model)}
    write_tensors(args.save_state, {**tensors, 'last': last}, about)


def prompt_and_state(args, model, meta):
    """-> the tokens to read (B, T), the state before them, and the tokens that the first text begins with"""
    data = meta['data']
    text = files.text_of(args.prompt)
    for word in data.special:
        if word in text and not args.special:
            note(f'{word} in --prompt is read as letters; --special reads it as a token')
            break
    if args.load_state:
        last, state = read_state(args, model, meta)
        prompt = vocabulary.continued(text, last[0].tolist(), data, args.special)   # the others go on alike
        texts = [before + prompt for before in last.tolist()]
        prompt = texts[0]
    else:
        state = None
        prompt = vocabulary.encode(text, data, args.special)
        texts = [vocabulary.with_bos(prompt, data)] * args.samples
    vocabulary.tell_lost(texts[0], data)
    return torch.tensor(texts, device=model.embed.weight.device), state, prompt


def classify(args, model, meta):
    """Print the classes of the prompt or, with --lines, the likeliest class of each of its lines."""
    data = meta['data']
    texts = files.lines_of(args.prompt) if args.lines else [files.text_of(args.prompt)]
    texts = [text.strip() for text in texts if text.strip()]               # as the texts of training were
    if not texts:
        raise ValueError('--prompt: there is no text to classify')
    names = dict(enumerate(data.labels))
    for text in texts:
        row = vocabulary.whole_text(text, data) or vocabulary.with_bos([], data)
        vocabulary.tell_lost(row, data)
        classes = classes_of(model, row, data)
        if args.lines:
            i, share = classes[0]
            print(f'{names.get(i, i)}\t{share:.3f}\t{text}', flush=True)
            continue
        for i, share in classes:
            name = f' ({names[i]})' if i in names else ''
            print(f'class {i}{name}: {share:.1%}', flush=True)


@torch.inference_mode()
def classes_of(model, row, data):
    """A text, a list of tokens -> pairs of a class and its probability, the likeliest first."""
    c = model.config
    tokens = torch.tensor([row], device=model.embed.weight.device)
    T = tokens.shape[1]
    if T > c.block_size:
        raise ValueError(f'--prompt: {T} tokens, but this model knows rows of at most {c.block_size}')
    whole = data.row or T
    if c.pad is None and T != whole:                        # half a picture is none
        raise ValueError(f'--prompt: {plural(T, "token")}, but a row of this model has {whole}')
    logits, _ = model(tokens)
    logits = logits.reshape(-1, c.classes)[-1:]             # the last token's, if there is one for each
    p, order = logits[0].softmax(-1).sort(descending=True)
    return list(zip(order.tolist(), p.tolist()))


def show_translations(args, model, meta):
    """Print a translation of each line of --source, one per line."""
    texts = files.lines_of(args.source)
    sources = torch.from_numpy(vocabulary.source_rows(texts, meta['data'])).long()
    sources = sources.to(model.embed.weight.device)
    for some in sources.split(AT_ONCE):
        for row in model.translate(some, args.beam, args.penalty).tolist():
            print(vocabulary.decode(row, meta['data']).replace('\n', ' '), flush=True)


# ---- the page: what each memory is given while a text is read, for assets/memory.html to compute with ---
@torch.no_grad()
def given_to_memories(model, tokens):
    """What the memory of each layer is given while a text is read, tokens (1, T) -> one dict per layer: q, k,
    v and the gates that it has, as `recurrent` takes them (1, H or G, n T, .), with n writes per token. A
    layer with a cache has `gone` (1, G, T) instead of v and gates, see Cache.evicted_at; with a matrix beside
    it `matrix`, such a dict again."""
    layers = []
    for seen in through(model, tokens):
        memory = seen.mixer.memory
        n = seen.mixer.n
        layer = {'n': n, 'q': seen.q, 'normalise': False, 'floor': None}
        if memory.rule.keeps:
            layer |= given_to_cache(memory, seen)
            if memory.overflow is not None:
                layer['matrix'] = given_to_overflow(memory, seen)
        else:
            layer |= memory.writes(seen.u, seen.k, seen.v)
            q, _ = memory.asked(seen.q, seen.k, layer, {})
            layer['q'] = spread(memory.normaliser(q), n, n - 1)         # read after the last write
            layer.update(normalise=memory.normalise and not memory.by_keys, floor=memory.phi.floor)
            if memory.by_keys:                              # as in FastWeights.divided_by_keys
                before = seen_by_k(layer['k'], layer['k'].cumsum(2))
                erase = layer['erase'] / before.clamp(min=FLOOR)
                layer['erase'] = erase.where(before > FLOOR, 0)     # at first S is empty; 16 bits end early
        layers.append(layer)
    return layers


def given_to_cache(memory, seen):
    """q, k and `gone` of a cache. If it shortens positions, its window has the true ones, and the `first`
    tokens are asked by `q_first`, from nearer (fast.caches.turned_scores)."""
    given = {'q': seen.q, 'k': seen.k, 'gone': memory.evicted_at(seen.q, seen.k, seen.v)}
    if memory.turn is not None:
        own = torch.arange(seen.q.shape[2], device=seen.q.device)
        given |= {'q': memory.rope(seen.q, own), 'k': memory.rope(seen.k, own)}
        if memory.rule.keeps == 'sink':
            gap = (own - memory.cache).clamp(min=0) + 1         # from the last of these to the window
            near = nearer(own, gap, memory.turn.keywords['positions'])
            given |= {'first': memory.sinks, 'q_first': memory.rope(seen.q, near)}
    return given


def given_to_overflow(memory, seen):
    """What the matrix beside a cache is given: at each step the token that the cache evicts, if there is one.
    `share` (1, H, T, 1) of what is read comes from the cache, the rest from the matrix."""
    matrix = memory.overflow
    _, log_cache, went, _ = memory.attend_and_evict(seen.q, seen.k, seen.v)
    q, went = memory.truly_turned(seen.q, went)
    _, mass, _ = matrix.take(q, went, {})
    share = memory.share(seen.u, log_cache, mass).mean(-1, keepdim=True)
    q, k, _, gates, _ = matrix.taken(q, went, {})
    return {'n': 1, 'q': matrix.normaliser(q), 'k': matrix.normaliser(k), 'v': went['v'], **gates,
            'share': share, 'normalise': not matrix.rule.erase, 'floor': 1e-30}


def on_page(given):
    """What a memory was given, as JSON for assets/memory.html."""
    found = {name: given[name] for name in ('n', 'normalise', 'floor')}
    found['heads'] = given['q'].shape[1]
    for name in 'q', 'k':
        if (given[name] >= 0).all():                        # features may be e^40 or e^-40, not so in 16 bits
            given[f'log_{name}'] = given.pop(name).log()
    found['arrays'] = {name: as_base64(given[ours]) for ours, name in RECORDED.items() if ours in given}
    if 'first' in given:
        found['first'] = given['first']
    if 'gone' in given:
        found['gone'] = given['gone'][0].tolist()
    if 'matrix' in given:
        found['matrix'] = on_page(given['matrix'])
    return found


def as_base64(x):
    """x (1, H, T, d) -> d, and all numbers as 16-bit floats in base64."""
    data = x[0].detach().cpu().half().numpy().tobytes()
    return {'d': x.shape[-1], 'data': base64.b64encode(data).decode()}


def by_whom(read, written):
    """Two lists of tokens -> one of pairs: a token, and whether the model wrote it."""
    return [(token, False) for token in read] + [(token, True) for token in written]


def write_page(args, model, meta, heard):
    """Write a copy of assets/memory.html with this run inside. heard: pairs as of `by_whom`"""
    if len(heard) > ON_A_PAGE:
        aside(f'--html: a page shows {ON_A_PAGE:,} tokens, so the end is not on it')
    tokens, written = map(list, zip(*heard[:ON_A_PAGE]))
    layers = []
    row = torch.tensor([tokens], device=model.embed.weight.device)
    for rule, given in zip(model.config.rules, given_to_memories(model, row)):
        about = {'rule': rule, 'what': RULES[rule].about, 'overflow': model.config.overflow}
        layers.append(about | on_page(given))
    texts = [added(tokens[max(0, i - LOOK_BACK):i], [token], meta['data']) for i, token in enumerate(tokens)]
    run = json.dumps({'about': args.init, 'tokens': texts, 'written': written, 'layers': layers})
    run = run.replace('<', '\\u003c')           # no text ends the script in which it stands
    with open(PAGE, encoding='utf-8') as f:
        page = f.read().replace('>null</script>', f'>{run}</script>', 1).encode()     # its empty recording
    files.write_file(args.html, [page])
    aside(f'{args.html}: {len(page) / 1e6:.1f} MB, open it in a browser')


def added(before, tokens, data):
    """The text that tokens add to the text of those before. Some decoders drop the blank before the first
    word, so both are decoded together."""
    seen = vocabulary.decode(before, data)
    if seen.endswith('\ufffd'):                     # with part of a character before, the next may break, too
        return vocabulary.decode(tokens, data)
    return vocabulary.decode(before + tokens, data)[len(seen):]


def show_text(before, held, data):
    """Print the held tokens once they end with a whole character, which may take four of them, as bytes, or
    after LOOK_BACK: an untrained model writes bytes that never become a character.
    -> the printed tokens that matter to the next ones; the tokens that wait for more"""
    text = added(before, held, data)
    if text.endswith('\ufffd') and len(held) < LOOK_BACK:
        return before, held
    print(text, end='', flush=True)
    return held, []


def write_texts(args, model, data, first, state, prompt=None):
    """Write what comes after the tokens `first` (B, 1) and the state before them. A text ends with a token
    that ends texts, which does not count. prompt: the tokens before, if the one text is printed as it comes
    -> the last tokens, their state, the tokens of each text, the number of steps, the seconds they took"""
    ends = data.ends
    if args.save_state and len(first) > 1:                  # in the state, no text stops before the others
        ends = []
    before = (prompt or [])[-LOOK_BACK:]                    # tokens that were printed, or given
    held = []                                               # those of an unfinished character
    texts = [[] for _ in first]
    ended = [False] * len(texts)
    last = first
    draw = torch.Generator(first.device).manual_seed(args.seed)
    steps = model.generate(first, state, args.temperature, args.top_k, args.top_p, draw)
    began = time.perf_counter()
    done = 0
    try:
        for _ in range(args.tokens):
            last, state = next(steps)
            for i, token in enumerate(last[:, 0].tolist()):     # which waits for a GPU
                ended[i] = ended[i] or token in ends
                if not ended[i]:
                    texts[i].append(token)
            done += 1
            if all(ended):
                break
            if prompt is not None:
                before, held = show_text(before, held + [token], data)
    except KeyboardInterrupt:
        if not (args.chat and sys.stdin.isatty()):          # then someone may go on with the chat
            raise
    seconds = time.perf_counter() - began
    if prompt is not None:
        print(added(before, held, data), flush=True)
    return last, state, texts, done, seconds


def spoken(args):
    """What a user says: --prompt, then or without it each line of standard input."""
    if args.prompt:
        yield files.text_of(args.prompt)
    while sys.stdin and (sys.stdin.isatty() or not args.prompt):
        if sys.stdin.isatty():
            print('> ', end='', file=sys.stderr, flush=True)
        try:
            line = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            line = b''
        if not line:
            if sys.stdin.isatty():
                aside('')                                   # what comes next begins a line
            return
        yield files.as_utf8(line, 'standard input').strip()


HELP = '/reset begins anew; /quit or Ctrl-D ends the chat; Ctrl-C ends an answer or, where you type, the chat'


@dataclass
class Chat:
    """What a conversation keeps."""
    messages: list
    heard: list = dataclasses.field(default_factory=list)   # its tokens, with `by_whom`
    state: dict = None                                      # after the first of these tokens
    text: str = ''                                          # what all of them say
    steps: int = 0                                          # of all answers, and the seconds they took
    seconds: float = 0

    def forget(self):
        """Read all anew, from the messages."""
        self.heard, self.state, self.text = [], None, ''

    @property
    def read(self):
        """How many tokens the state has."""
        return int(self.state['t']) if self.state else 0


def converse(args, model, meta):
    """A conversation and, however it ends, its page and what it took."""
    system = system_prompt(args, meta['data'])
    talk = Chat([*system])
    try:
        for said in spoken(args):
            if said == '/quit':
                break
            if said == '/help':
                aside(HELP)
            elif said == '/reset':
                talk.messages = [*system]
                talk.forget()
            elif said:
                answer(args, model, meta['data'], talk, said)
    finally:
        if args.html and talk.heard:
            write_page(args, model, meta, talk.heard)
        if talk.state:
            speed = f', {talk.steps / talk.seconds:,.1f} tokens/s in answers' if talk.steps else ''
            aside(f'{plural(talk.read, "token")} read and written{speed}; '
                  f'state of {state_bytes(talk.state):,} bytes')


def system_prompt(args, data):
    """The messages with which a chat begins: none, or --system. ValueError if the template leaves it out."""
    if not args.system:
        return []
    from data import chat
    system = [{'role': 'system', 'content': files.text_of(args.system)}]
    asked = [{'role': 'user', 'content': 'Hello'}]
    if chat.rendered(system + asked, data) == chat.rendered(asked, data):
        raise ValueError(f'--system: the chat template of {args.init} has no place for it; leave it out')
    return system


def answer(args, model, data, talk, said):
    """Answer what is said, in the model's chat template. The state is handed from answer to answer. If a
    template changes what was said before, all is read again. At a terminal, Ctrl-C ends the answer, which
    stays in the conversation as far as it is written."""
    from data import chat
    talk.messages.append({'role': 'user', 'content': said})
    text = chat.rendered(talk.messages, data)
    before = len(talk.heard)
    if not text.startswith(talk.text):
        talk.forget()
    new = vocabulary.encode(text[len(talk.text):], data, special=True)
    vocabulary.tell_lost(new, data)
    talk.heard += by_whom(new, [])
    ids = [token for token, _ in talk.heard[talk.read:]]
    if not ids:
        raise ValueError(f'{args.init}: its chat template makes nothing of these messages')
    tell_if_past(model.config, before, len(talk.heard))
    tokens = torch.tensor([ids], device=model.embed.weight.device)
    last, written = tokens[:, -1:], []
    try:
        talk.state = model.read(tokens[:, :-1], talk.state, label='reading')
        last, talk.state, [written], steps, seconds = write_texts(args, model, data, last, talk.state, ids)
        talk.steps += steps
        talk.seconds += seconds
    except KeyboardInterrupt:                               # while it read
        if not sys.stdin.isatty():
            raise
    if len(written) == args.tokens:
        aside(f'(cut off; --tokens={args.tokens} is the most that an answer may have)')
    elif last.item() not in data.ends:
        aside('(cut off)')
    tell_if_past(model.config, len(talk.heard), len(talk.heard) + len(written))
    talk.heard += by_whom([], written)
    written = vocabulary.decode(written, data)
    talk.messages.append({'role': 'assistant', 'content': written})
    talk.text = text + chat.tamed(written, data)


def tell_if_past(c, before, now):
    """Say what happens beyond the positions that a model knows, once a text of `before` tokens has `now`.
    c: its Config"""
    if not before <= c.block_size < now:
        return
    window = c.keeps() == {'window'}
    near = (c.positions != 'true' or window) and c.cache <= c.block_size and not c.overflow
    if c.pos == 'learned':
        aside(f'past {c.block_size:,} tokens, the last learned position is repeated')
    elif c.turns() and not near:
        aside(f'past {c.block_size:,} tokens, rope meets distances that it did not meet in training')


def complete(args, model, meta):
    """Read the prompt, write what comes after it, keep the state, and say how long it took."""
    c = model.config
    tokens, state, prompt = prompt_and_state(args, model, meta)
    read = tokens.shape[1]
    if args.save_state and state is None and read == 1 and not args.tokens:
        raise ValueError('--save_state --tokens=0: nothing is read yet, as the next step reads a last token; '
                         'give a longer --prompt, or more --tokens')
    aside(f'{c.summary()} from {args.init}; recurrence: {model.why}')
    tell_if_past(c, 0, read + args.tokens + (int(state['t']) if state else 0))
    began = time.perf_counter()
    if args.load_state:
        state = model.read(tokens[:, :-1], state, label='reading')
    elif read > 1:                                          # all texts begin alike: that is read once
        state = model.read(tokens[:1, :-1], state, label='reading')
        state = chosen_texts(state, torch.zeros(args.samples, dtype=torch.long))
    alone = prompt if len(tokens) == 1 else None
    reading = time.perf_counter() - began
    last, state, texts, steps, seconds = write_texts(args, model, meta['data'], tokens[:, -1:], state, alone)
    if len(texts) > 1 and args.tokens:
        for i, text in enumerate(texts, 1):
            print(f'--- {i} ---\n{added(prompt[-LOOK_BACK:], text, meta["data"])}')
    if args.save_state:
        keep_state(args, model, meta, last, state)
    if args.html:
        write_page(args, model, meta, by_whom(tokens[0].tolist(), texts[0]))
    speed = ''
    if steps:
        speed = f', {steps * len(texts) / seconds:,.0f} tokens/s'
    else:
        read -= 1                                           # the last one waits for a step
    growth = 'growing' if 'all' in c.keeps() else 'whatever the length'
    aside(f'{plural(read, "token")} read in {reading:.2f} s, {steps:,} written{speed}; '
        f'state of {state_bytes(state):,} bytes, {growth}')


DO = {'translate': show_translations, 'classify': classify, 'chat': converse, 'complete': complete}


def refuse_before_reading(args, given, swap, config):
    """What can be refused before a text is read."""
    refuse(idle(swap, config))
    refuse(useless(task_of(args, config), given, args, config))
    for path in filter(None, (args.save_state, args.html)):
        if os.path.isdir(path):
            raise ValueError(f'{path}: a folder; give the name of a file')
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)     # fails now, not after sampling
    if os.path.exists(args.save_state) and 'made_with' not in read_tensors(args.save_state)[1]:
        raise ValueError(f'{args.save_state}: a state is never written over something else; give another '
                         'name')


@script
def main(argv):
    given, swap = parse(argv, __doc__, Args, CacheFlags, first=OFTEN)
    args = Args(**given)
    device = pick_device(args.device)
    model, meta = load(args.init, device, dtype=getattr(torch, args.dtype), **swap)
    c = model.config
    refuse_before_reading(args, given, swap, c)
    if c.overflow and c.overflow != meta['config']['overflow']:
        aside(f'--overflow={c.overflow}: untrained, new weights; convert.py --recipe=hybrid trains some')
    model.use(pick_forms(args.impl))
    if args.dtype == 'bfloat16':
        model.in_bfloat16()
    take_threads(args.threads, device, functools.partial(model.first_layer, 1, 1))
    DO[task_of(args, c)](args, model, meta)


if __name__ == '__main__':
    sys.exit(main())
