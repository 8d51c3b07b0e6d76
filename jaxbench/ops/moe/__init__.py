"""A mixture of experts, except its matmuls: `routing` chooses experts, and `dispatch` exchanges
tokens between their own ranks and the ranks of their experts.

Dimension letters are as in `ops`.
"""
