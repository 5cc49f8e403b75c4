"""Our methods for Quantus' metrics: an `explain_func` with its calling convention, numpy in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .methods import find_method
from .subject import Subject, read_targets


def quantus_explain(method: Any = "default") -> Callable[..., Any]:
    """A function for Quantus' `explain_func`, for any method that `compare` knows.

    >>> import torch
    >>> explain = quantus_explain("gamma")
    >>> x = torch.randn(2, 4).numpy()
    >>> explain(model=torch.nn.Linear(4, 3), inputs=x, targets=[0, 2]).shape
    (2, 4)
    """
    found = find_method(method)

    def explain(model: nn.Module, inputs: Any, targets: Any, *, device: Any = None, method: Any = None) -> Any:
        # `method` is the label under which quantus.evaluate lists this function
        first = next(model.parameters(), None)
        x = torch.as_tensor(inputs, dtype=torch.float32 if first is None else first.dtype)
        x = x if device is None else x.to(device)
        subject = Subject(model)
        batch = subject.read(x)
        relevance = found.relevance(subject, batch, read_targets(targets, len(batch)), range(len(batch)))
        return relevance.detach().cpu().numpy()

    return explain
