"""Every error and warning that this package raises; nothing else.

LRPError (RuntimeError)
├── GraphError            the output, the inputs and the graph between them
│   ├── NoGraphError          the output was made without autograd
│   ├── FreedGraphError       a backward pass already freed the graph
│   ├── UnusedInputError      the output does not depend on an input
│   ├── NoInputError          nothing among the arguments can be explained
│   └── OpaqueGraphError      compiled, scripted or reentrant code hides the operations
├── TargetError           a target or seed that does not fit the output
│   └── ZeroOutputError       relevance seeded where the output is zero
├── PresetError           an unknown preset, rule or override
├── UnknownOpError        operations without a row
├── LostActivationError   a value that a rule needs and nobody kept
├── UnsupportedTensorError  complex or sparse tensors where a rule cannot take them
├── NonFiniteError        relevance that became inf or nan
├── CaptureError          a model that cannot become a CUDA graph
└── EvaluationError       an evaluation that cannot be done as asked
TrainingModeWarning (UserWarning)
TargetWarning (UserWarning)   what is explained is not the target's value
"""

__all__ = [
    "CaptureError",
    "EvaluationError",
    "FreedGraphError",
    "GraphError",
    "LRPError",
    "LostActivationError",
    "NoGraphError",
    "NoInputError",
    "NonFiniteError",
    "OpaqueGraphError",
    "PresetError",
    "TargetError",
    "TargetWarning",
    "TrainingModeWarning",
    "UnknownOpError",
    "UnsupportedTensorError",
    "UnusedInputError",
    "ZeroOutputError",
]


class LRPError(RuntimeError):
    """Base of all errors of this package."""


class GraphError(LRPError):
    """The output, the inputs and the graph between them do not fit."""


class NoGraphError(GraphError):
    """The output carries no autograd graph."""


class FreedGraphError(GraphError):
    """The graph's saved tensors are gone."""


class UnusedInputError(GraphError):
    """The output does not depend on a requested input."""


class NoInputError(GraphError):
    """No argument of the model can be explained."""


class OpaqueGraphError(GraphError):
    """A node hides the operations it is made of."""


class TargetError(LRPError):
    """The target or seed does not fit the output."""


class ZeroOutputError(TargetError):
    """Relevance was seeded where the output is zero."""


class PresetError(LRPError):
    """An unknown preset, or an override that fits nothing."""


class UnknownOpError(LRPError):
    """Operations on the way have no row in the table."""


class LostActivationError(LRPError):
    """A rule needs a value that nobody kept and nothing can rebuild."""


class UnsupportedTensorError(LRPError):
    """A rule cannot take this kind of tensor."""


class NonFiniteError(LRPError):
    """Relevance became inf or nan."""


class CaptureError(LRPError):
    """The model or its arguments cannot be captured as a CUDA graph."""


class EvaluationError(LRPError):
    """Model, data, methods and settings of an evaluation do not fit together."""


class TrainingModeWarning(UserWarning):
    """The model explains itself differently at every call in training mode."""


class TargetWarning(UserWarning):
    """What is explained is not the value of the target."""
