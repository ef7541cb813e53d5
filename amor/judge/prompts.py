"""The five examples of the paper: its teaser sentence, and a text for each of the four domains it
names.

The paper gives the words of the first only. The DNA is the beginning of the human insulin mRNA's
coding sequence, the poem is Blake's, the other two are our own.
"""

PAPER: dict[str, str] = {
    "teaser": "The Eiffel Tower is a lattice tower on the Champ de Mars in Paris.",
    "DNA sequence": "ATGGCCCTGTGGATGCGCCTCCTGCCCCTGCTGGCGCTGCTGGCCCTCTGGGGACCTGACCCAGCCGCAGCC",
    "mathematical reasoning": (
        "A train leaves at 9:00 and travels 120 km in 1.5 hours. Its speed is 120 / 1.5 = 80 km/h, "
        "so after 4 hours it has travelled 80 x 4 = 320 km."
    ),
    "news lead": (
        "OSLO, Tuesday - The city council voted 31 to 28 on Monday night to close the old harbour "
        "to cars from next spring, ending a dispute that had lasted for six years."
    ),
    "poetry": (
        "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\n"
        "Could frame thy fearful symmetry?"
    ),
}
