"""How the bundled demo model that sees is built.

scenes.py         what is in a picture: coloured shapes in places, or a number; which scenes are held out
drawing.py        draws a scene with Pillow
questions.py      questions about a scene, each with its only correct answer
conversations.py  a scene and some of its questions as one row of tokens; the tokenizer and its texts
batches.py        rows and patches of one step, and what each patch shows
model.py          the model, of transformers' own class
train.py          runs everything;  evaluate.py, card.md: scores through the engine and the model card
"""
