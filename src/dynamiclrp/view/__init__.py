"""Ways to look at relevance. Knows values and Attributions, never the engine."""

from .account import Sums, sums_table
from .page import Answer, Candidate, Machine, Picture, heat_map, page, token_line

__all__ = ["Answer", "Candidate", "Machine", "Picture", "Sums", "heat_map", "page", "sums_table", "token_line"]
