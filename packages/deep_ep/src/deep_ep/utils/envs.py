"""Process groups, seeds and speeds of links, where DeepEP 2 keeps them."""

from fanfold.deep_ep.utils.envs import *  # noqa: F403
from fanfold.deep_ep.utils.envs import __all__ as __all__
