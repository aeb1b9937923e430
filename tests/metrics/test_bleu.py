"""BLEU and chrF equal sacrebleu's scores. Tokenised BLEU equals sacrebleu's BLEU of tokens split at hyphens."""

import math

import pytest
import sacrebleu

from axial.metrics import bleu

TRANSLATIONS = ["Ein Hund läuft über den Schnee.", "Zwei Bau-Arbeiter stehen auf einem Dach.", "Ein Mann schläft."]
REFERENCES = ["Ein Hund rennt über den Schnee.", "Zwei Bauarbeiter stehen auf einem Dach.", "Der Mann schläft."]


def test_scores_are_sacrebleus():
    scores = bleu.scores(TRANSLATIONS, REFERENCES)
    assert 100 * scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score, rel=1e-12)
    assert 100 * scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score, rel=1e-12)
    assert (
        scores["signatures"]["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert bleu.scores(REFERENCES, REFERENCES)["tokenized_bleu"] == pytest.approx(1)


def test_compounds_are_split_at_hyphens():
    assert bleu.compound_split("Bau-Arbeiter, a-b-c (x-y) - z.") == (
        "Bau ##AT##-##AT## Arbeiter , a ##AT##-##AT## b ##AT##-##AT## c ( x ##AT##-##AT## y ) - z ."
    )


def test_tokenized_bleu_is_bleu_of_the_split_tokens():
    ours, theirs = ([bleu.compound_split(text) for text in side] for side in (TRANSLATIONS, REFERENCES))
    expected = sacrebleu.corpus_bleu(ours, [theirs], smooth_method="none", tokenize="none", force=True).score
    assert 100 * bleu.scores(TRANSLATIONS, REFERENCES)["tokenized_bleu"] == pytest.approx(expected, rel=1e-9)


def test_no_sentence_has_no_score():
    scores = bleu.scores([], [])
    assert math.isnan(scores["bleu"]) and scores["signatures"] == {}
