"""Run every command of README.md, and of "How to" in assets/RESULTS.md, in order, in a fresh clone:

    python .ci/readme.py FOLDER

    FOLDER/clone                    what is committed here
    FOLDER/01.log, 01.err, ...      what each command printed

A command is a line of a code block, or a text in backquotes, that begins with pip, python, torchrun or
pytest. Commands run as README has them, with two exceptions. CUT has flags that make them short. MADE makes
stand-ins for a reader's own files and for downloads. Only packages are really downloaded. Hub models lie in a
cache as huggingface_hub keeps it, which the commands that name one find. The two commands that install and
then run something (&&) come first. The exit code is 1 if any does not end as expected.
"""
import functools
import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
import zipfile

LIMIT = 3600                        # seconds until a command is stopped

# pattern in a command: flags that make it short and replace README's. Later lines win.
CUT = {
    r'^pip .* pytest': '-vv',       # .ci/run reads in its log which tests need more packages
    r'train\.py': '--steps=3 --val_tokens=4096',
    r'(train|convert)\.py --(data|from|init|rule=softmax)': '--threads=1',   # the others time the threads
    r'=listops': '--data=listops-64',                                   # rows of 64 are generated faster
    r'train\.py --resume': '--steps=5',
    r'convert\.py (?!.*--export)': '--steps=2 --distil_steps=2 --eval_rows=2',
}


# ---- stand-ins: each function makes one thing in the clone -------------------------------------------------
def prose(n, seed=0):
    """-> n lines: sentences of invented words."""
    draw = random.Random(seed)
    words = [''.join(draw.choices(('ba', 'de', 'fi', 'go', 'hu', 'ka', 'le'), k=draw.randint(1, 4)))
             for _ in range(400)]
    return [' '.join(draw.choices(words, k=8)).capitalize() + '.' for _ in range(n)]


def write(path, content):
    """Write bytes or lines to a file, gzipped if it ends in .gz. Make its folder first."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not isinstance(content, bytes):
        content = '\n'.join([*content, '']).encode()
    opened = gzip.open if path.endswith('.gz') else open
    with opened(path, 'wb') as f:
        f.write(content)


def prepare(clone, *words):
    """Run python data/prepare.py WORDS in the clone."""
    command = [sys.executable, 'data/prepare.py', *words]
    subprocess.run(command, cwd=clone, check=True, stdout=subprocess.DEVNULL)


def texts(clone):
    """A reader's own text files."""
    write(f'{clone}/my.txt', prose(1000))
    write(f'{clone}/novels.txt', prose(3000))


def shakespeare(clone):
    """Invented text. It is prepared under another name, since the real file has a known checksum."""
    write(f'{clone}/play.txt', prose(1000))
    prepare(clone, 'play.txt', '--tokenizer=char')
    made, = [name for name in os.listdir(f'{clone}/data') if name.startswith('text-play-')]
    os.rename(f'{clone}/data/{made}', f'{clone}/data/shakespeare')


@functools.cache
def wikitext2(clone):
    """Invented text, in the tokens of the invented models -> the text of their tokenizer.json."""
    write(f'{clone}/made/wiki/wiki.train.raw', prose(2000))
    write(f'{clone}/made/wiki/wiki.valid.raw', prose(200, seed=1))
    prepare(clone, 'wikitext2', '--file=made/wiki', '--tokenizer=bpe:512')
    path = f'{clone}/data/wikitext2/meta.json'
    with open(path) as f:
        meta = json.load(f)
    meta.update(tokenizer='json', marks=True)               # in one line, as a hub model's is kept
    meta['json'] = json.dumps(json.loads(meta['json']), ensure_ascii=False, separators=(',', ':'))
    write(path, [json.dumps(meta)])
    return meta['json']


def cola(clone):
    """The zip, where a reader would put it by hand."""
    lines = [f'x\t{i % 2}\t\t{text}' for i, text in enumerate(prose(200))]
    path = f'{clone}/data/cola/cola_public_1.1.zip'
    os.makedirs(os.path.dirname(path))
    with zipfile.ZipFile(path, 'w') as z:
        for name in 'in_domain_train', 'in_domain_dev', 'out_of_domain_dev':
            z.writestr(f'cola_public/raw/{name}.tsv', '\n'.join(lines))


def multi30k(clone):
    """Its files, given as a folder, since those are not checked by a checksum."""
    for side in 'train', 'val', 'test_2016_flickr':
        for seed, language in enumerate(('en', 'de')):
            write(f'{clone}/made/pairs/{side}.{language}.gz', prose(300, seed))
    prepare(clone, 'multi30k', '--file=made/pairs')


HUB_MODEL = """
import sys
from data.kinds import Data
from hub.families import FAMILIES
from hub.folders import to_folder
from models.files import class_and_config, whole_config
folder, kind, tokens = sys.argv[1:]
sizes = dict(n_layer=2, n_head=2, n_embd=16, n_inner=16, vocab_size=512, block_size=1024)
cls, config = class_and_config({'config': dict(rule='softmax', **sizes, **FAMILIES[kind].config)}, kind)
template = '{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:'
data = Data('json', 512, json=tokens, files={'chat_template.jinja': template})
to_folder(folder, cls(config).state_dict(), whole_config(config), data)
"""


def hub_model(clone, kind, folder):
    """A folder in the hub's layout with a model of two layers of width 16, as to_folder writes it."""
    tokens = wikitext2(clone)
    subprocess.run([sys.executable, '-c', HUB_MODEL, folder, kind, tokens], cwd=clone, check=True)


def in_cache(clone, kind, name):
    """A model OWNER/NAME, where huggingface_hub keeps what it has downloaded."""
    folder = f'made/hub/models--{name.replace("/", "--")}'
    hub_model(clone, kind, f'{folder}/snapshots/made')
    write(f'{clone}/{folder}/refs/main', b'made')


def gpt2(clone):
    """A GPT-2."""
    in_cache(clone, 'gpt2', 'openai-community/gpt2')


def bert(clone):
    """A pretrained BERT, without a classifier head."""
    in_cache(clone, 'bert', 'google-bert/bert-base-uncased')


def smollm2(clone):
    """A Llama by its name on the hub."""
    in_cache(clone, 'llama', 'HuggingFaceTB/SmolLM2-135M-Instruct')


def llama(clone):
    """A Llama in a reader's own folder."""
    hub_model(clone, 'llama', 'FOLDER')


MADE = {    # part of a command: the function that makes it, before the first such command
    '=shakespeare': shakespeare, '=wikitext2': wikitext2, '=cola': cola, '=multi30k': multi30k,
    '=my.txt': texts, '=novels.txt': texts, '=FOLDER': llama,
    '=gpt2': gpt2, '=bert-base-uncased': bert, '=HuggingFaceTB/': smollm2}


# ---- the run -----------------------------------------------------------------------------------------------
def commands(text):
    """The commands of a README, in order, except that those with && come first: they install packages."""
    lines = []
    for block, inline in re.findall(r'```\n(.*?)```|`([^`]+)`', text, re.S):
        for line in block.splitlines() or [' '.join(inline.split())]:
            line = line.partition('  #')[0].rstrip()        # a remark
            if re.match(r'(\w+=\w+ )?(pip|python|torchrun|pytest) ', line):
                lines.append(line)
    return sorted(lines, key=lambda command: '&&' not in command)


def cut(command):
    """The command, with the flags of CUT."""
    typed = command
    for pattern, flags in CUT.items():
        if re.search(pattern, command):
            for flag in flags.split():
                name = flag.partition('=')[0]
                typed = re.sub(rf' {name}(=\S+)?(?= |$)', '', typed) + f' {flag}'
    return typed


def ended(command, clone, env, log):
    """Run a command -> exit code, seconds"""
    began = time.perf_counter()
    typed = ['timeout', str(LIMIT), 'bash', '-c', command]
    with open(f'{log}.log', 'w') as out, open(f'{log}.err', 'w') as err:
        code = subprocess.run(typed, cwd=clone, env=env, stdout=out, stderr=err).returncode
    return code, time.perf_counter() - began


def expected(command, code, log):
    """Whether a command ended as it should."""
    if not command.startswith('EXERCISE=1'):
        return code == 0
    with open(f'{log}.log') as f:                           # the exercises are undone: only they may fail
        red = re.findall(r'^(?:FAILED|ERROR) (.*)', f.read(), re.M)
    return code == 1 and all(line.startswith('test_all.py::test_exercise_') for line in red)


def main(folder):
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    clone = f'{folder}/clone'
    subprocess.run(['git', 'clone', '-q', here, clone], check=True)
    with open(f'{clone}/README.md') as f:
        text = f.read()
    with open(f'{clone}/assets/RESULTS.md') as f:
        text += f.read().partition('## 8. How to')[2]
    listed = list(dict.fromkeys(commands(text)))
    made = set()
    failed = 0
    for number, command in enumerate(listed, 1):
        typed = cut(command)
        makers = [maker for name, maker in MADE.items() if name in typed]
        for maker in makers:
            if maker not in made:
                made.add(maker)
                maker(clone)
        env = dict(os.environ)
        print(f'{number:2}  {command}')
        if makers:
            print(f'    made up: {", ".join(maker.__name__ for maker in makers)}')
        if set(makers) & {gpt2, bert, smollm2}:
            env.update(HF_HUB_CACHE=f'{clone}/made/hub', HF_HUB_OFFLINE='1')
        print(f'    cut: {typed}' if typed != command else '    as it stands', flush=True)
        log = f'{folder}/{number:02}'
        code, seconds = ended(typed, clone, env, log)
        print(f'    exit code {code}, {seconds:.1f} s', flush=True)
        if not expected(command, code, log):
            failed += 1
            print('    NOT AS EXPECTED. It ended with:')
            for name in f'{log}.log', f'{log}.err':         # pytest prints failures on standard output
                with open(name) as f:
                    print(f.read()[-3000:], flush=True)
    print(f'{len(listed)} commands, {failed} did not end as expected')
    return min(failed, 1)


if __name__ == '__main__':
    sys.exit(main(os.path.abspath(sys.argv[1])))
