"""Ways to look at relevance: pages, terminals, figures. Knows results and their values, never the engine."""
