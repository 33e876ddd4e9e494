"""Placeholders grow to the size of their images; what does not match is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.multimodal.test_patches import TOWER

from octavo.errors import InvalidParameterError
from octavo.multimodal.placeholders import PlaceholderRange, expand_vision_placeholders

P, V, S, E = 1, 2, 3, 4  # of TOWER
UNMARKED = replace(TOWER, vision_start_token_id=None, vision_end_token_id=None, video_token_id=None)


def test_each_placeholder_grows_to_the_merged_patches_of_its_image() -> None:
    made = expand_vision_placeholders([9, S, P, E, S, P, E, 8], np.array([[1, 4, 6], [1, 2, 2]]), TOWER)
    assert made.token_ids == [9, S, *[P] * 6, E, S, P, E, 8]
    assert made.ranges == [PlaceholderRange(2, 6), PlaceholderRange(10, 1)]
    again = expand_vision_placeholders(made.token_ids, np.array([[1, 4, 6], [1, 2, 2]]), TOWER)
    assert again == made


def test_images_and_videos_have_placeholders_of_their_own() -> None:
    made = expand_vision_placeholders([S, V, E, S, P, E, S, V, E], [[1, 2, 2]], TOWER, [[2, 2, 2], [1, 2, 4]])
    assert made.token_ids == [S, V, V, E, S, P, E, S, V, V, E]
    expected = [PlaceholderRange(1, 2, is_video=True), PlaceholderRange(5, 1), PlaceholderRange(8, 2, is_video=True)]
    assert made.ranges == expected
    with pytest.raises(InvalidParameterError, match=r"1 videos.*placeholders for 0"):
        expand_vision_placeholders([S, P, E], [[1, 2, 2]], TOWER, [[1, 2, 2]])


def test_without_images_nothing_changes() -> None:
    assert expand_vision_placeholders([9, S, 8], None, TOWER).token_ids == [9, S, 8]


@pytest.mark.parametrize(
    ("input_ids", "grids", "names"),
    [
        ([S, P, E], [[1, 2, 2]] * 2, "2 images.*placeholders for 1"),
        ([S, P, E, S, P, E], [[1, 2, 2]], "1 images.*placeholder for another one .token 3"),
        ([S, P], [[1, 2, 2]], "end of the prompt.*vision end token"),
        ([S, P, 9, E], [[1, 2, 2]], "token 9.*vision end token"),
        ([S, P, E, P], [[1, 2, 2]], "1 of them are not between"),
        ([S, P, E], [[1, 3, 2]], "multiples of 2"),
        ([S, P, E], [[0, 2, 2]], "at least one frame"),
        ([S, P, E], [[1, 0, 2]], "multiples of 2"),
        ([S, P, E], [1, 2, 2], "images, 3"),
        ([S, P, E], [[1.0, 2.0, 2.0]], "images, 3"),
        ([S, P, E], [[1, 2, 2], [1]], "images, 3"),
        ([S, P, E], [[1, 2**20, 2**20]], "274877906944 tokens, at most 4194304"),
    ],
)
def test_a_mismatch_is_refused_by_name(input_ids: list[int], grids: Any, names: str) -> None:
    with pytest.raises(InvalidParameterError, match=names):
        expand_vision_placeholders(input_ids, grids, TOWER)


def test_without_marks_each_placeholder_is_an_image() -> None:
    config = replace(UNMARKED, image_size=56)  # 4 x 4 patches, 4 tokens
    made = expand_vision_placeholders([9, P, P, 8], [[1, 4, 4]] * 2, config)
    assert made.token_ids == [9, *[P] * 8, 8]
    assert made.ranges == [PlaceholderRange(1, 4), PlaceholderRange(5, 4)]
    assert expand_vision_placeholders(made.token_ids, [[1, 4, 4]] * 2, config) == made
    for input_ids, names in [
        ([P] * 3, "placeholder for another one .token 2"),
        ([P], "2 images.*placeholders for 1"),
        ([P] * 7 + [9, P], "other tokens among placeholders.*token 4"),
    ]:
        with pytest.raises(InvalidParameterError, match=names):
            expand_vision_placeholders(input_ids, [[1, 4, 4]] * 2, config)
    with pytest.raises(InvalidParameterError, match=r"image_grid_thw=\[1, 2, 2\].*one size"):
        expand_vision_placeholders([P], [[1, 2, 2]], config)
