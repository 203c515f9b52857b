"""A decoder that says classes: one at each place, from what stands up to there.

    Classifier(ClassifierConfig(rule='delta', classes=3))   # tokens (B, T) -> logits (B, T, classes), state

The class of a text is that at its last place. It reads like an RNN, in a state of constant size; an encoder
(encoder.py), which sees the whole text at once, is what data with classes ask for otherwise.
"""
from dataclasses import dataclass

from torch import nn

from common.flags import known
from models.pretrained import Pretrained, PretrainedConfig


@dataclass
class ClassifierConfig(PretrainedConfig):
    """A PretrainedConfig with classes instead of an output layer for tokens"""
    causal: bool = True                     # --causal=true asks for this kind
    classes: int = known(0, 0, 2 ** 32)
    pad: int = known(None, 0, 2 ** 32)      # the token that marks padding, which stands behind the last place


class Classifier(Pretrained):
    config_class = ClassifierConfig
    task = 'classify'

    def add_output(self, c):
        super().add_output(c)
        self.head = nn.Linear(c.n_embd, c.classes)
        nn.init.ones_(self.norm.weight)

    def logits(self, x):
        return self.head(x)

    def cannot_train(self, data, name, steps):
        yield not data.classes or data.patch, (
            f'--causal=true --data={name}: it says the class of a text: lines 0<TAB>text in a .tsv (not '
            '.csv), or a set such as listops')
