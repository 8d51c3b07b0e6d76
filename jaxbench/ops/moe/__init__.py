"""A mixture of experts, except its matmuls: `routing` chooses experts, `maps` gives tokens their
slots, and `dispatch` exchanges them between their own ranks and the ranks of their experts.

Dimension letters are as in `ops`.
"""
