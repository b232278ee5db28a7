"""AngularGrad: Adam whose steps are scaled by the angle between consecutive gradients."""

import math
from collections.abc import Callable
from typing import Any, Literal, final, overload

import torch
from torch.optim.optimizer import ParamsT

from evenly.errors import SpecError

_RIGHT_ANGLE = math.pi / 2


@final
class AngularGrad(torch.optim.Optimizer):
    r"""AngularGrad with the cosine or the tangent of the angle; every element has an angle of its own.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        A_t = \arctan \left| \frac{g_t - g_{t-1}}{1 + g_t g_{t-1}} \right|, \quad A_{min} = \min(A_{t-1}, A_t) \\
        \phi_t = \lambda_1 \tanh |\angle(A_{min})| + \lambda_2, \quad \angle = \cos \text{ or } \tan \\
        \theta_t = \theta_{t-1} - \eta \, \phi_t \, \hat m_t / (\sqrt{\hat v_t} + \epsilon)

    with :math:`\hat m_t = m_t / (1 - \beta_1^t)`, :math:`\hat v_t = v_t / (1 - \beta_2^t)`, :math:`g_0 = 0` and
    :math:`A_{min} = A_1` at the first step. Weight decay is added to the gradient before all of this.

    Sources differ in the minimum. This class takes it element by element, of the current angle and the one before.
    The program that the authors published decides for a tensor as a whole, by a vote of its elements against a
    minimum that begins at 0: the vote is lost at every step, so that :math:`\phi_t` stays :math:`\lambda_2`. Others
    describe the smallest angle of all steps, which soon is about 0.

    All state but `step` has the shape of the parameter and begins at zero: it can be averaged and reset at exchanges,
    and is cut as the parameter is. `previous_complement` holds :math:`\pi/2 - A_{t-1}`.

    Args:
        params: parameters or groups of them.
        lr: the step size eta.
        angle: the function of the angle, "cos" or "tan".
        betas: decay of the first and the second moment.
        eps: is added to the denominator.
        lambdas: lambda_1 and lambda_2.
        weight_decay: times the parameter, added to the gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AngularGrad([weight], lr=0.1)
        >>> weight.grad = torch.zeros(2).add_(1e-6)
        >>> optimizer.step()
        >>> round(weight[0].item(), 4)  # the angle is almost 0: 1 - 0.1 * (tanh(1) / 2 + 1 / 2)
        0.9128

    Reference: Roy, Paoletti, Haut, Dubey, Kar, Plaza, Chaudhuri 2021, AngularGrad: A New Optimization Technique for
    Angular Convergence of Convolutional Neural Networks.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        *,
        angle: Literal["cos", "tan"] = "cos",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        lambdas: tuple[float, float] = (0.5, 0.5),
        weight_decay: float = 0.0,
    ) -> None:
        if angle not in ("cos", "tan"):
            raise SpecError(f"AngularGrad was asked for with angle={angle!r}. Give 'cos' or 'tan'.")
        numbers = (float(lr), eps, *lambdas, weight_decay)
        if not (all(number >= 0 for number in numbers) and all(0 <= beta < 1 for beta in betas)):
            raise SpecError(
                f"AngularGrad was asked for with lr={lr}, betas={betas}, eps={eps}, lambdas={lambdas}, "
                f"weight_decay={weight_decay}, and one of them is out of range. Give betas from 0 to below 1, and the "
                "others of at least 0."
            )
        settings = {"angle": angle, "betas": betas, "eps": eps, "lambdas": lambdas, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **settings})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step; returns the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._advance(parameter, parameter.grad, group)
        return loss

    def _advance(self, theta: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        if theta.is_complex() or g.is_sparse:
            raise SpecError(
                f"AngularGrad was asked to step on a parameter of {list(theta.shape)} that is complex or has a sparse "
                "gradient, which it cannot. Use dense real parameters, or another optimizer for this one."
            )
        state = self._state_of(theta)
        beta1, beta2 = group["betas"]
        if group["weight_decay"] != 0:
            g = g.add(theta, alpha=group["weight_decay"])
        state["step"] += 1
        t = state["step"].item()
        m = state["exp_avg"].lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        phi = self._coefficient(g, state, group)
        denominator = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        theta.addcdiv_(phi.mul_(m), denominator, value=-float(group["lr"]) / (1 - beta1**t))

    def _coefficient(self, g: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
        """Returns phi, and keeps the gradient and the angle for the next step."""
        previous = state["previous_grad"]
        # pi/2 - A: it begins at 0, the widest angle, so that the first minimum is the first angle; nothing is divided
        complement = torch.atan2((g * previous).add_(1).abs_(), (g - previous).abs_())
        narrowest = torch.maximum(state["previous_complement"], complement).neg_().add_(_RIGHT_ANGLE)  # A_min
        state["previous_grad"].copy_(g)
        state["previous_complement"].copy_(complement)
        lambda1, lambda2 = group["lambdas"]
        function = narrowest.cos_() if group["angle"] == "cos" else narrowest.tan_()
        return function.abs_().tanh_().mul_(lambda1).add_(lambda2)

    def _state_of(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[theta]
        if not state:
            wide = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            state["step"] = torch.tensor(0.0, dtype=wide)
            for name in ("exp_avg", "exp_avg_sq", "previous_grad", "previous_complement"):
                state[name] = torch.zeros_like(theta)
        return state
