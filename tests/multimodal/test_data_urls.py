"""`data:` URLs in the forms that clients write."""

import pytest

from octavo.errors import InvalidParameterError
from octavo.multimodal.pictures import is_data_url, read_data_url

ABCD = b"ABCD\xff"  # QUJDRP8=


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,QUJDRP8=",
        "data:image/png;base64,QUJDRP8",
        "data:image/png;base64,QUJDRP9=",  # the last bits belong to no byte
        "data:image/png;base64,QUJD\r\nRP8=\n",
        "data:image/png;base64,QUJD RP8 =",
        "data:image/png;base64,QUJD%0ARP8%3D",
        "data:image/png;base64,QUJDRP8=#fragment",
        " \nDATA:image/png;BASE64,QUJDRP8= ",
        "Data:image/png;charset=utf-8; base64 ,QUJDRP8=",
        "data:image/png;name=a.png;base64,QUJDRP8=",
        "data:;base64,QUJDRP8=",
        "data:image/png,ABCD%ff",
        "data:,%41BCD%FF",
    ],
)
def test_forms(url: str) -> None:
    assert is_data_url(url)
    assert read_data_url(url, "image", 5) == ABCD


@pytest.mark.parametrize("body", ["QUJDR", "QUJDRP8==", "QUJDRP8=A", "QUJ=DRP8", "QUJDRP_-", "====", "Q@JD"])
def test_what_is_not_base64(body: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"image=.*not valid base64"):
        read_data_url(f"data:image/png;base64,{body}", "image", 100)


@pytest.mark.parametrize("url", ["data:image/png;base64,QUJDRP8=", "data:,ABCDE"])
def test_limit(url: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"5 bytes.*at most 4 bytes"):
        read_data_url(url, "image", 4)


def test_other_urls() -> None:
    assert not any(map(is_data_url, ("database.png", "http://h/data:", "data", "")))
