r"""The divergence of a model's own layers: how a training step moves activations, against how it should.

The paper (George Bird, *The Affine Divergence*, arXiv 2512.22247) compares two steps. Gradient descent on the
activations themselves would move an output z by the *ideal* update -eta g, g = dL/dz. Gradient descent on the
parameters moves it by the *effective* update. :func:`diagnose` computes both for every layer of a model, on one batch.

**One layer, its input held.** Let a layer be applied to rows x_1, x_2, ... : the tokens of a linear layer, or the
patches (one per output position and group) of a convolution, of all samples and of all calls of the layer. Every map
of this package is linear in its parameters, z_p = W phi_x(x_p) + b phi_1(x_p), and a row adds g_p psi_x(x_p)^T to dL/dW
and g_p psi_1(x_p) to dL/db. So one step of size eta on W and b moves z_p by exactly

    -eta sum_q K(p, q) g_q,        K(p, q) = phi(x_p) . psi(x_q)

with the kernel of the correction (s = 1, or the square root of ``scale="rms"``; x - mean(x) for x if centred):

============  ================================  =================================  =====================================
correction    phi = (phi_x, phi_1)              psi                                K(p, p)
============  ================================  =================================  =====================================
none          (x, 1)                            the same                           ||x||^2 + 1, the affine divergence
affine        s (x, 1) / sqrt(||x||^2 + 1)      the same                           s^2: exactly 1 in the paper's form
norm          (s x / ||x||, 1)                  the same                           s^2 + 1
gradient      (x, 1)                            (x, 1) / (||x||^2 + 1)             1
============  ================================  =================================  =====================================

(Without a bias, or with a frozen one, its 1 is missing.) The factor K(p, p) of a row's own gradient and the
cross-sample terms are the paper's; that all of it is one kernel, the split of the cross terms and the attention
logits are ours. g is the gradient of the loss as it is, with its mean over the batch and with everything behind the
layer: that samples meet in a BatchNorm behind a convolution changes g, not the theory. (The layer's z is then what
the convolution returns, before the BatchNorm.) Ratios of updates do not depend on the mean's 1 / batch.

**What is reported** (:class:`LayerDivergence`), from the three parts of sum_q K(p, q) g_q:

* *same*: q = p. Its factor K(p, p) has a mean (``divergence``) and a standard deviation over the rows; their ratio
  ``spread`` is 0 where the rows of a layer move by one common multiple of their ideal updates.
* *patch*: other rows of p's sample: other patches of a convolution, other tokens, other calls.
* *sample*: rows of other samples. The last two are the *interference*.
* ``cosine`` and ``norm_ratio``: of the whole effective update to the ideal one, both as one long vector over all rows.
* ``shares``: the lengths of the three parts over their sum.

A layer's rows belong to the sample along the first dimension of its input, in equal runs (windows, frames).

**Only this layer moves, its input held.** That is the theory's question. In a training step the layers before it move
too, and its input with them; that drift is not in these numbers. ``whole_step=True`` measures it beside them.

**Cost.** Nothing of the size of K is formed. The sum over all q is the layer itself with its parameters' gradient for
parameters, since dL/dW = sum_q g_q psi_q^T. The sum over a sample's own rows is that with the sample's own gradient,
(sum_q g_q psi_q^T) phi_p, or sum_q g_q (psi_q . phi_p), whichever multiplies less; the latter only where the matrix of
the positions' products is smaller than the rows themselves.

**Attention logits** a_ij = f(q_i, k_j), with q = W_q x_i + b_q and k = W_k x_j + b_k, as they enter the softmax. One
step of W_q and W_k for the one logit a_ij moves it, to first order, by -eta dL/da_ij times

    D_ij = K_q(i, i) (df/dq . df*/dq) + K_k(j, j) (df/dk . df*/dk)

where f* holds constant what the backward pass does. For plain logits c q . k

    D_ij = c^2 (||k_j||^2 (||x_i||^2 + 1) + ||q_i||^2 (||x_j||^2 + 1))

The whole update is the derivative of f along the effective updates of q and k; *patch* means other pairs of tokens of
the sample. The gradient dL/da comes from q, k, v and the gradient of the attention's output. Reached are timm's
``Attention``, :class:`affdiv_zoo.layers.CorrectedAttention`, and every call of torch's
``scaled_dot_product_attention`` whose q and k are parts of linear layers' outputs (transformers' ViT, for one).

**With** ``verify=True`` real steps check the predictions: the layer's own forward is run in float64 with its parameters
moved by a small step of the gradient that autograd finds, its input held, for the batch, for one sample and for one
row. The largest relative difference is reported.

Over training: :class:`DivergenceLogger`, and for transformers' ``Trainer``
:class:`affdiv_zoo.diagnostics.trainer.DivergenceCallback`.

Everything that is not covered (other maps, normalisers' scales, logits that cannot be reached, frozen layers) is listed
with its reason.
"""

from affdiv_zoo.diagnostics._diagnose import diagnose
from affdiv_zoo.diagnostics.logger import DivergenceLogger
from affdiv_zoo.diagnostics.report import DivergenceReport, LayerDivergence, NotCovered

__all__ = ["DivergenceLogger", "DivergenceReport", "LayerDivergence", "NotCovered", "diagnose"]
