"""Whole random programs, what they mean, and the engine compared with that.

rules       textbook formulas, in relevance form; what every preset maps where
tape        what a program means, operation by operation, and its relevance
blocks      blocks of programs, in torch in several spellings and as what they mean
entries     how programs begin (numbers, pictures, ids) and end
program     a whole program as plain data: its model, its tape, its shapes
exceptions  where two spellings of one function are two explanations
check       the engine against the oracle and itself: the only file that calls it
draw        hypothesis strategies; shapes with known, not yet mended defects
"""
