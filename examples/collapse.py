"""Why skewed labels collapse features, on a deep linear network (FedDecorr, Theorem 1): python examples/collapse.py"""

from isofed import diagnostics as D

print("classes held   rank of G   rank of the weights' product")
for held in (10, 5, 2, 1):
    found = D.linear_collapse([1] * held + [0] * (10 - held))
    print(f"{held:>5} of 10 {found.gradient.effective_rank:12.1f} {found.product.effective_rank:12.1f}")
