"""Publishing models to the Hugging Face Hub and fetching them: one commit a push, checked before and after.

    from affdiv_zoo.hub import pull, push

    push("runs/resnet20_cifar_patchnorm-digits-seed0", "user/name")
    pull("user/name", "here")

:func:`push_to_hub` does it with a model that is not saved yet, :func:`publish` with all of the released weights.
"""

from affdiv_zoo.hub._errors import FolderError, HubError
from affdiv_zoo.hub._publish import publish
from affdiv_zoo.hub._pull import pull
from affdiv_zoo.hub._push import PushReport, push, push_to_hub

__all__ = ["FolderError", "HubError", "PushReport", "publish", "pull", "push", "push_to_hub"]
