"""BLEU and chrF of translations by sacrebleu, and tokenised BLEU as in papers on WMT14 English-German."""

import re

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_COMPOUND = re.compile(r"(\S)-(?=\S)")


def scores(translations, references):
    """BLEU and chrF of a corpus.

    Args:
        translations, references: lists of sentences.

    Returns:
        dict of 'bleu' and 'chrf' with sacrebleu's defaults, 'tokenized_bleu' (see `compound_split`), all from 0 to 1,
        and their 'signatures'. Without sentences, the scores are NaN.
    """
    tokenized = BLEU(tokenize="none", smooth_method="none", force=True)  # the text is already tokenised
    metrics = {"bleu": BLEU(), "tokenized_bleu": tokenized, "chrf": CHRF()}
    if not translations:
        return {**dict.fromkeys(metrics, float("nan")), "signatures": {}}
    texts = dict.fromkeys(metrics, (translations, references))
    texts["tokenized_bleu"] = tuple([compound_split(text) for text in side] for side in texts["bleu"])
    result = {name: metric.corpus_score(texts[name][0], [texts[name][1]]) for name, metric in metrics.items()}
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    return {**{name: score.score / 100 for name, score in result.items()}, "signatures": signatures}


def compound_split(text):
    """Tokenises a sentence and makes hyphens between words separate tokens: 'rich-text' -> 'rich - text'.

    Papers on WMT14 English-German split compounds like this in both translations and references. The papers use Moses'
    tokeniser; this function uses sacrebleu's tokeniser mteval-v13a.
    """
    return _COMPOUND.sub(r"\1 ##AT##-##AT## ", Tokenizer13a()(text))


def sentence_score(translation, reference):
    """chrF of one sentence, from 0 to 1. BLEU is only defined for a corpus."""
    return CHRF().sentence_score(translation, [reference]).score / 100
