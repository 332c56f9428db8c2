"""The tokenizer: byte-level BPE, so that every text has tokens and comes back unchanged.

Each answer of each fact, with its leading space, is one token; a text starts with the begin mark.
"""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from demo_model import corpus, facts

SIZE = 1984
MAX_POSITIONS = 2048

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] not in ['system', 'user'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% else %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class SplitAnswer(Exception):
    """An answer is more than one token: the vocabulary is too small for the facts."""


def train(seed: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer trained on the corpus; raises SplitAnswer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    marks = [
        AddedToken(mark, special=True, normalized=False)
        for mark in (corpus.BOS, corpus.EOS, corpus.PAD)
    ]
    trainer = BpeTrainer(
        vocab_size=SIZE,
        special_tokens=marks,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.vocabulary_sample(seed), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{corpus.BOS} $A",
        pair=f"{corpus.BOS} $A $B",
        special_tokens=[(corpus.BOS, tokenizer.token_to_id(corpus.BOS))],
    )
    for relation in facts.RELATIONS:
        for answer in sorted(set(relation.answers.values())):
            if len(tokenizer.encode(f" {answer}", add_special_tokens=False).ids) != 1:
                raise SplitAnswer(answer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        pad_token=corpus.PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
