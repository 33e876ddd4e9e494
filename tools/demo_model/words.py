"""Word lists for names, records and lists to copy."""

import random
import string


def words(text: str) -> tuple[str, ...]:
    """Split a text into words."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Ada Alan Alice Amir Ana Anton Bela Ben Bruno Carla Chen Clara Dana David Elena Emil Emma Erik Eva Felix "
    "Fatima Finn Grace Greta Hana Hugo Ida Igor Ines Ivan Jack Jana Jonas Julia Kai Karin Lara Leo Lena Lin Lucas "
    "Luna Mara Marco Maria Max Mei Mia Milan Mina Nadia Nico Nina Noah Nora Olga Omar Oscar Otto Paula Pedro "
    "Petra Priya Quinn Rahul Rita Rosa Ruth Sam Sara Simon Sofia Tara Theo Tom Uma Vera Victor Wanda Will Yara "
    "Yuki Zoe"
)
CITIES = words(
    "Athens Basel Berlin Bern Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Kyoto Lagos Lima Lisbon "
    "London Lyon Madrid Milan Mumbai Munich Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Sydney Tallinn "
    "Tokyo Toronto Turin Vienna Warsaw Zagreb Zurich"
)
THINGS = words(
    "apple arrow basket bell bench bird boat book bottle bread bridge brush button cable candle card chair cheese "
    "clock cloud coat coin cup desk door drum engine feather field fish flag flower fork forest garden gate glass "
    "glove hammer hat hill house island jar kettle key kite ladder lake lamp leaf lemon letter map mirror moon "
    "mountain needle nest orange paper pencil piano pillow plate pocket rain ribbon ring river road rock roof "
    "rope sail salt sand shell ship shoe silver snow spoon star stone sugar table tea train tree umbrella violin "
    "wagon wall watch water wheel window wood"
)
ADJECTIVES = words(
    "big blue bright broken brown calm clean cold dark dry empty fast flat green grey happy heavy hot large light "
    "little long loud narrow new old open pink plain purple quick quiet red round sharp short silent slow small "
    "soft sweet tall thin tiny warm white wide wild wooden yellow young"
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange", "brown", "grey", "pink")


def made_up(rng: random.Random) -> str:
    """Return a random string of letters: copying it requires reading, not knowledge."""
    letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 4)))
    return letters.capitalize() if rng.random() < 0.25 else letters


def item(rng: random.Random) -> str:
    """Return a thing, an adjective, a name, a number or an invented string."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(THINGS)
    if kind < 0.5:
        return rng.choice(ADJECTIVES)
    if kind < 0.6:
        return rng.choice(FIRST_NAMES + CITIES)
    return str(rng.randrange(1000)) if kind < 0.8 else made_up(rng)
