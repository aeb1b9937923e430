"""BLEU of translations, as sacrebleu computes it, and as papers on WMT14 English-German report it."""

import re

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_COMPOUND = re.compile(r"(\S)-(?=\S)")


def scores(translations, references):
    """BLEU and chrF of a corpus.

    Args:
        translations, references: lists of sentences.

    Returns:
        dict of 'bleu' and 'chrf', by sacrebleu's defaults, and 'tokenized_bleu' (see `compound_split`), all from 0 to
        1, and of their 'signatures'. The scores are NaN without sentences.
    """
    tokenized = BLEU(tokenize="none", smooth_method="none", force=True)  # of text that is tokenised already
    metrics = {"bleu": BLEU(), "tokenized_bleu": tokenized, "chrf": CHRF()}
    if not translations:
        return {**dict.fromkeys(metrics, float("nan")), "signatures": {}}
    texts = dict.fromkeys(metrics, (translations, references))
    texts["tokenized_bleu"] = tuple([compound_split(text) for text in side] for side in texts["bleu"])
    result = {name: metric.corpus_score(texts[name][0], [texts[name][1]]) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    return {**{name: score.score / 100 for name, score in result.items()}, "signatures": signatures}


def compound_split(text):
    """A tokenised sentence in which hyphens between words are words of their own, as 'rich-text' -> 'rich - text'.

    Papers on WMT14 English-German score tokenised text whose compounds are split so, in translation and reference
    alike. They tokenise as Moses does; this tokenises as mteval-v13a does, which sacrebleu has.
    """
    return _COMPOUND.sub(r"\1 ##AT##-##AT## ", Tokenizer13a()(text))


def sentence_score(translation, reference):
    """chrF of one sentence, from 0 to 1. BLEU is of corpora."""
    return CHRF().sentence_score(translation, [reference]).score / 100
