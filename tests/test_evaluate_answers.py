"""Exact match, F1 and relevance on spans, by hand."""

import pytest
import torch

from dynamiclrp import evaluate as ev
from dynamiclrp.errors import EvaluationError


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Normans", "normans"),
        ("  a   cat,  an ox & the theatre. ", "cat ox theatre"),
        ("10th-century", "10thcentury"),
        ("Ünïted", "ünïted"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(text, normal):
    assert ev.normalise_answer(text) == normal


@pytest.mark.parametrize(
    ("said", "gold", "match", "score"),
    [
        ("Paris", ["Paris"], 1, 1),
        ("the city of Paris", ["Paris"], 0, 0.5),  # precision 1/3, recall 1
        ("Denver Broncos", ["Broncos", "The Denver Broncos!"], 1, 1),  # the best of the answers counts
        ("Lyon", ["Paris"], 0, 0),
        ("to be or not to be", ["to be"], 0, 0.5),  # repeated words count as often as both have them: 2 of 6 and 2
        ("", [], 1, 1),  # unanswerable, nothing said
        ("Paris", [], 0, 0),
        ("", ["Paris"], 0, 0),
        ("the", ["Paris"], 0, 0),  # nothing left after normalising
        ("Paris", "Paris", 1, 1),
    ],
)
def test_exact_match_and_f1(said, gold, match, score):
    assert ev.exact_match(said, gold) == match
    assert ev.f1(said, gold) == pytest.approx(score)


RELEVANCE = torch.tensor([[0.9, 0.1, 0.5, 0.3, 0.2], [0.0, -5.0, 0.2, 0.4, 0.1]])


def test_top_tokens_and_spans():
    spans = [[2, 3], [3, 4]]
    assert ev.top_in_span(RELEVANCE, spans).tolist() == [0, 1]
    assert ev.top_in_span(RELEVANCE, spans, k=2).tolist() == [1, 1]
    # the first token may not count (a question's token): then 0.5 at position 2 is the largest
    allowed = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert ev.top_in_span(RELEVANCE, spans, allowed=allowed).tolist() == [1, 1]


def test_overlap_with_as_many_tokens_as_the_span_has():
    # row 0: the two most relevant are {0, 2}, the span {2, 3}: 1 of 3; row 1: {3, 2} and {3, 4}: 1 of 3
    assert ev.span_iou(RELEVANCE, [[2, 3], [3, 4]]).tolist() == pytest.approx([1 / 3, 1 / 3])
    assert ev.span_iou(RELEVANCE, [[0, 0], [2, 3]]).tolist() == [1, 1]
    # two tokens wanted, but only one may be chosen: {3} and {3, 4}
    assert ev.span_iou(RELEVANCE[1:], [[3, 4]], allowed=torch.tensor([[0, 0, 0, 1, 0]])).tolist() == [0.5]


def test_any_of_several_right_answers_counts():
    spans = torch.tensor([[[0, 0], [2, 3]], [[0, 1], [-1, -1]]])
    assert ev.top_in_span(RELEVANCE, spans).tolist() == [1, 0]
    assert ev.span_iou(RELEVANCE, spans).tolist() == [1, 0]


def test_agreement_names_what_it_gives():
    found = ev.span_agreement(RELEVANCE, [[0, 0], [0, 0]], [[2, 3], [3, 3]])
    assert {name: values.tolist() for name, values in found.items()} == {
        "tgs": [1, 0],
        "tgs_top2": [1, 0],
        "gold_iou": [1, 0],
        "tps": [0, 1],
        "tps_top2": [1, 1],
        "predicted_iou": pytest.approx([1 / 3, 1]),
    }


@pytest.mark.parametrize(
    ("relevance", "spans", "message"),
    [
        (RELEVANCE, [[3, 2], [0, 0]], "ends before it starts"),
        (RELEVANCE, [[0, 5], [0, 0]], "beyond the 5 tokens"),
        (RELEVANCE, [[0, 0]], r"expected \[2, 2\]"),
        (RELEVANCE, [[0, 0], [-1, -1]], "row 1 has no span"),
        (RELEVANCE[..., None], [[0, 0], [0, 0]], "one number per token"),
        (RELEVANCE / 0, [[0, 0], [0, 0]], "nan or inf"),
    ],
)
def test_bad_spans_are_refused(relevance, spans, message):
    with pytest.raises(EvaluationError, match=message):
        ev.top_in_span(relevance, spans)
