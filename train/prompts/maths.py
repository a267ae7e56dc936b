"""Grade-school maths in our own sentences: word problems and bare exercises to be randomised."""

_GIRLS = (
    "Amara", "Beatriz", "Chloe", "Daniela", "Elif", "Freya", "Grace", "Hana", "Ingrid", "Jasmine",
    "Keiko", "Leila", "Maya", "Nadia", "Olivia", "Priya", "Rosa", "Sofia", "Tamara", "Yasmin",
    "Zoe", "Hannah", "Emily", "Lucy", "Nora", "Mrs. Okafor", "Ms. Lindqvist", "Aunt Petra",
)  # fmt: skip
_BOYS = (
    "Ahmed", "Bruno", "Carlos", "David", "Emeka", "Felix", "Gabriel", "Hugo", "Ivan", "Jamal",
    "Kenji", "Liam", "Mateo", "Noah", "Omar", "Pablo", "Rahul", "Sam", "Theo", "Viktor", "Wei",
    "Yusuf", "Zack", "Jack", "Ben", "Mr. Haddad", "Mr. Novak", "Uncle Dimitri",
)  # fmt: skip
_THINGS = {
    "small": (
        "marbles", "stickers", "seashells", "buttons", "beads", "stamps", "coins", "trading cards",
        "toy cars", "paper cranes", "pebbles", "badges", "comic books", "postcards", "keychains",
    ),
    "fruit": (
        "apples", "pears", "oranges", "plums", "peaches", "mangoes", "lemons", "kiwis", "apricots",
    ),
    "baked": ("muffins", "cookies", "rolls", "cupcakes", "bagels", "pies", "scones", "brownies"),
    "goods": (
        "notebooks", "pens", "candles", "mugs", "scarves", "T-shirts", "posters", "plants",
        "lamps", "puzzles", "water bottles", "tote bags", "caps", "umbrellas", "paintbrushes",
    ),
    "one": (
        "notebook", "mug", "scarf", "T-shirt", "poster", "backpack", "lamp", "puzzle", "skateboard",
        "jacket", "pair of shoes", "board game", "bicycle helmet", "tennis racket", "blanket",
    ),
    "animal": ("chickens", "goats", "rabbits", "ducks", "sheep", "horses", "pigs", "cows"),
    "box": ("box", "bag", "crate", "basket", "carton", "tray"),
    "vehicle": ("car", "bus", "train", "truck", "motorbike", "van"),
    "place": (
        "school", "library", "museum", "bakery", "farm", "zoo", "gym", "theatre", "bookshop",
        "community centre", "cinema", "garden centre", "hotel", "factory", "summer camp",
    ),
    "job": (
        "gardener", "babysitter", "lifeguard", "dog walker", "waiter", "tutor", "cashier",
        "mechanic", "painter", "plumber", "photographer", "cook",
    ),
    "liquid": ("juice", "milk", "water", "lemonade", "paint", "olive oil", "soup"),
    "sport": ("basketball", "football", "handball", "rugby", "hockey", "volleyball"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "part": ("half", "a third", "a quarter", "a sixth", "two thirds", "three quarters"),
    "material": ("plank", "rope", "ribbon", "wire", "pipe", "roll of fabric"),
    "flower": ("roses", "tulips", "daisies", "lilies", "sunflowers", "orchids"),
}  # fmt: skip

PEOPLE = (
    {**_THINGS, "name": _GIRLS, "friend": _BOYS, "she": ("she",), "She": ("She",), "her": ("her",)},
    {**_THINGS, "name": _BOYS, "friend": _GIRLS, "she": ("he",), "She": ("He",), "her": ("his",)},
)

WORD_PROBLEMS = (
    # Sharing, collecting, losing
    "{name} has {a=20..90} {small}. {She} gives {b=3..9} of them to {friend} and loses {2..8} on "
    "the way home. How many {small} does {name} have left?",
    "{name} collected {a=12..60} {small} in spring and {k=2..4} times as many in summer. How many "
    "{small} did {she} collect in the two seasons together?",
    "{friend} owns {a=15..70} {small}, which is {b=4..12} more than {name} owns. How many do they "
    "own in total?",
    "Between them, {name} and {friend} have {a=40..120/2} {small}. {name} has {b=4..20/2} more "
    "than {friend}. How many does each of them have?",
    "{name} shares {a=60..240/60} {small} equally among {her} {k=3..6} cousins and keeps none. "
    "Then each cousin finds {2..7} more. How many does each cousin have now?",
    "A jar holds {a=60..240/12} {small}. {name} takes out {part} of them. How many remain in the "
    "jar?",
    "{name} puts {her} {n=48..144/12} {small} in albums that hold {k=6..12/6} each. {She} owns "
    "{2..4} albums already. How many more albums does {name} need to buy?",
    "{name} had some {small}. After giving {a=5..20} to {friend} and then doubling what was left, "
    "{she} had {b=20..80/2}. How many did {name} have at the start?",
    "Three friends pool their {small}: {name} brings {a=8..30}, {friend} brings twice as many, and "
    "{name.2} brings {b=3..7} fewer than {friend}. How many are in the pool?",
    "{name} has {a=30..80} {small} and {friend} has {b=5..25}. How many must {name} hand over so "
    "that both have equally many?",
    # Shopping and prices
    "A {one} costs ${p=6..45} and a pack of {goods} costs ${q=2..9}. {name} buys {2..4} of the "
    "first and {2..6} packs of the second. How much does {she} spend?",
    "{name} buys {k=2..9} {goods} at ${p=3..15} each and pays with ${b=150..200/50}. How much "
    "change does {she} get?",
    "A {one} normally costs ${p=20..120/10}. This week it is {d=10..50/5}% off. What does {name} "
    "pay for it?",
    "A shop sells {goods} at {k=3..5} for ${p=6..18}. How much would {k*4} of them cost?",
    "{name} saves ${a=5..25} every week. {She} wants a {one} that costs ${p=80..240/20} and has "
    "${b=10..40} already. After how many weeks can {name} buy it?",
    "At the market {fruit} cost ${p=2..5} a kilogram and {fruit.2} cost ${q=3..7} a kilogram. "
    "{name} buys {2..6} kilograms of each. What is the total?",
    "The price of a {one} was ${p=20..60/5}. It rose by {10..40/10}% in May and then fell by "
    "{10..30/10}% in June. What was the price at the end of June?",
    "{name} bought {k=10..40} {goods} for ${p=2..6} each and sold them all for ${q=7..12} each. "
    "What profit did {she} make?",
    "A ticket to the {place} is ${p=8..20/2} for adults and half of that for children. How much do "
    "{2..4} adults and {3..8} children pay altogether?",
    "{name} has a coupon for ${c=5..10} off any purchase over $50. {She} picks {k=3..6} {goods} "
    "costing ${p=12..25} each. How much does {name} pay with the coupon?",
    "A restaurant bill comes to ${p=40..160/20}. {name} and {her} {k=3..4} friends add a "
    "{t=10..20/5}% tip and split everything equally. How much does each person pay?",
    "Sales tax in {name}'s town is {t=5..10}%. What is the final price of a {one} marked "
    "${p=20..200/20}?",
    "{name} buys {a=2..5} dozen {baked} at ${p=6..9} a dozen and sells them at ${1..3} apiece. "
    "How much money does {she} earn after subtracting the cost?",
    "Two shops sell the same {one}. The first asks ${p=40..90/10} with {d=10..30/10}% off, the "
    "second ${q=35..80/5} without a discount. Where should {name} buy it, and how much is saved?",
    "{name} spent {part} of {her} money on a {one} and then ${b=4..20} on lunch. {She} has "
    "${c=6..30} left. How much money did {she} have at first?",
    # Work, wages, saving
    "{name} works as a {job} and earns ${p=11..24} an hour. On weekdays {she} works {h=3..8} hours "
    "a day, and on Saturday {k=2..6} hours. How much does {name} earn in a week?",
    "As a {job}, {name} is paid ${p=12..20/2} an hour for the first 40 hours and one and a half "
    "times as much for overtime. What does {she} earn in a week of {h=42..50} hours?",
    "{name} earns ${m=1800..3600/300} a month, pays {part} of it in rent and spends "
    "${f=200..400/50} on food. How much is left?",
    "{name} can paint a fence in {a=3..6} hours, and {friend} needs {b=7..12} hours for the same "
    "fence. How long do they need if they work together?",
    "If {k=3..8} workers finish a wall in {d=6..20/2} days, how many days would {k*2} workers "
    "need at the same pace?",
    "{name} puts ${p=500..2000/100} in a savings account with {r=2..6}% simple interest a year. "
    "How much money is in the account after {y=2..5} years?",
    "Each month {name} saves {d=10..30/5}% of {her} salary of ${m=1000..3000/200}. How much has "
    "{she} saved after {k=3..9} months?",
    "{name} spends ${a=2..6} on coffee every working day. How much would {she} save in "
    "{k=4..12} weeks by making coffee at home for $1 a cup?",
    "{name} washes cars for ${p=6..12} each and mows lawns for ${q=15..25}. Last month {she} "
    "washed {8..20} cars and earned ${m=300..500/20} in all. About how many lawns did {she} mow?",
    # Motion, time
    "A {vehicle} travels at {v=40..90/5} km per hour for {h=2..5} hours and then at "
    "{w=30..60/5} km per hour for another {g=2..3} hours. How far does it go in all?",
    "{name} lives {d=6..30/2} km from the {place}. {She} cycles there at {v=10..20/2} km per hour "
    "and walks home at {w=4..6} km per hour. How long does the round trip take?",
    "Two trains leave stations that are {d=240..600/60} km apart and move towards each other at "
    "{v=50..70/10} and {w=50..70/10} km per hour. After how many hours do they meet?",
    "{name} runs {k=3..8} km on {day} and increases the distance by {p=2..3} km every day. How far "
    "does {she} run in {n=4..7} days?",
    "A film starts at {h=2..8}:{m=10..50/5} pm and lasts {d=95..150/5} minutes. {name} needs "
    "{w=15..40/5} minutes to walk home afterwards. At what time does {she} get home?",
    "{name} must be at the {place} at {h=8..10}:30 am. {She} needs {a=20..45/5} minutes to get "
    "ready and {b=15..50/5} minutes to travel. What is the latest time {she} can get up?",
    "A {vehicle} uses {c=5..9} litres of fuel for 100 km. Fuel costs ${p=2..3} a litre. How much "
    "does the fuel for a trip of {d=200..900/50} km cost?",
    "{name} reads {p=12..30} pages a day of a book with {n=240..600/20} pages. {She} has been "
    "reading for {k=3..6} days. How many pages are left?",
    "A {vehicle} leaves at 9:{m=10..50/10} am and arrives at {h=1..5}:{k=10..50/10} pm. It stops "
    "twice for {s=10..20/5} minutes each. For how long was it moving?",
    "It takes {name} {a=12..25} minutes to walk a kilometre and {friend} {b=5..11} minutes to run "
    "one. If they start together on a {k=2..6} km path, how long does {friend} wait at the end?",
    "A plane flies {d=900..3600/300} km with the wind in {h=2..4} hours and needs an hour more on "
    "the way back. What is the difference between the two average speeds?",
    # Ages
    "{name} is {a=6..14} years old. {friend} is {k=2..4} times as old. How old will {friend} be "
    "when {name} is {a+10}?",
    "The sum of the ages of {name} and {friend} is {s=30..70/2}. {friend} is {d=4..12/2} years "
    "older. How old is {name}?",
    "In {y=4..30} years {name} will be twice as old as {she} is now. How old is {she} now?",
    "{friend} is {k=3..5} times as old as {name}. In {y=5..12} years {friend} will be twice as old "
    "as {name}. Find their ages today.",
    "{name} was {a=22..32} years old when the twins were born. How old will the twins be when "
    "{name} is {k=2..3} times as old as they are?",
    # Fractions, percentages, averages
    "In a class of {n=20..40/4} students, a quarter play {sport} and {p=20..60/20}% of the others "
    "sing in the choir. How many students do neither?",
    "{name} ate {part} of a cake, and {friend} ate half of what was left. What fraction of the "
    "cake remains?",
    "A tank holds {v=120..600/60} litres of {liquid}. In the morning {part} of it is used, and in "
    "the afternoon {b=5..30/5} litres more. How many litres are left?",
    "{name}'s scores in four tests are {60..99}, {60..99}, {60..99} and {60..99}. What must {she} "
    "score in the fifth test for an average of {a=80..88}?",
    "The {sport} team won {p=40..80/10}% of its {n=20..60/10} games. How many games did it lose?",
    "In a survey of {n=200..800/100} people, {p=15..45/5}% liked tea best, {q=20..40/5}% liked "
    "coffee best and the rest preferred {liquid}. How many people preferred {liquid}?",
    "A recipe for {k=4..6} people needs {g=200..600/50} grams of flour and {e=2..4} eggs. How much "
    "flour and how many eggs does {name} need for {k*3} people?",
    "The number of visitors to a {place} grew from {a=400..900/100} to {b=1000..1800/100} in a "
    "year. By what percentage did it grow?",
    "{name} cut {part} off a {material} that was {l=12..60/12} metres long, then cut the rest "
    "into {k=3..6} equal pieces. How long is each piece?",
    "{p=20..60/20}% of the {n=50..250/50} {flower} in a garden are red, and half of the others are "
    "white. How many {flower} are neither red nor white?",
    "Out of every {k=5..10/5} {goods} that a machine makes, one is faulty. How many good ones are "
    "there in a batch of {n=200..1000/50}?",
    "The ratio of {fruit} to {fruit.2} in a {box} is {2..5} to {3..7}. There are {n=60..240/60} "
    "pieces of fruit in {k=2..4} such boxes. About how many are {fruit.2}?",
    # Packing, rows, groups
    "A {place} orders {n=8..25} cartons of {goods}, with {k=6..24/6} in each. {b=5..20} of them "
    "are damaged. How many can be sold?",
    "{name} bakes {a=4..9} trays of {baked} with {k=8..15} on each tray. {She} packs them in "
    "boxes of {b=4..6}. How many full boxes does {she} get, and how many {baked} are left over?",
    "A farmer keeps {a=12..60/12} {animal} and {b=5..30} {animal.2}. The farmer sells {part} of "
    "the {animal} and buys {3..9} more {animal.2}. How many animals are on the farm now?",
    "{a=120..300/10} people go on a trip in buses with {k=40..56/4} seats each. How many buses are "
    "needed, and how many seats stay empty?",
    "There are {r=6..20} rows of seats in a {place}, with {c=10..24} seats in each. On {day} "
    "{e=15..60} seats were empty. How many people came?",
    "A farm has chickens and cows. {name} counts {h=10..40/2} heads and {h*3} legs. How many cows "
    "are there?",
    "{name} plants {r=4..12} rows of {flower}. Each row has {k=2..4} more than the one before, and "
    "the first row has {f=5..10}. How many {flower} does {she} plant?",
    "A full {box} of {fruit} weighs {w=8..20} kg and the empty {box} weighs 1 kg. If {k=4..8} "
    "{fruit} weigh 1 kg, how many {fruit} are inside?",
    "{name} has {q=4..15} quarters, {d=5..20} dimes and {n=3..12} nickels. How much money is that "
    "in dollars?",
    "{name} needs {n=100..400/20} {small} to fill a board. {She} places {a=8..15} every day, but "
    "{her} cat knocks off {b=2..5} each night. On which day is the board full?",
    # Geometry and measure
    "A rectangular garden is {l=8..30} metres long and {w=4..20} metres wide. {name} wants a fence "
    "around it that costs ${p=5..15} a metre. What does the fence cost?",
    "The floor of a room is {l=4..9} m by {w=3..8} m. Tiles are sold in boxes that cover "
    "{k=2..4} square metres and cost ${p=15..40/5} a box. How much does it cost to tile the room?",
    "The perimeter of a rectangle is {p=40..120/4} cm. It is {d=2..8/2} cm longer than it is "
    "wide. Find its area.",
    "A swimming pool is {l=10..25/5} m long, {w=4..10} m wide and {d=2..3} m deep. How many "
    "litres of water fill it? (1 cubic metre is 1000 litres.)",
    "A bottle holds {v=500..1500/250} ml of {liquid}. {name} fills glasses of {g=125..250/125} ml "
    "from {k=2..8} bottles. How many glasses can {she} fill?",
    "{name} walks around a square park with sides of {s=150..400/50} metres {k=2..6} times. How "
    "many kilometres does {she} walk?",
    "One side of a triangle is {a=8..15} cm, the second is {b=2..6} cm longer and the third is "
    "twice the first minus 1 cm. What is the perimeter?",
    # Several steps
    "On {day}, {name} sold {a=15..40} {baked}; the day after {she} sold {k=2..3} times as many, "
    "and on the third day {b=5..14} fewer than on the second. Each costs ${p=2..5}. How much did "
    "{she} take in?",
    "{name} downloads {n=10..40/2} songs. Half of them are {a=3..5} minutes long and the others "
    "are {b=6..8} minutes long. How many hours of music is that?",
    "A hotel has {f=3..9} floors with {r=10..30/10} rooms on each. {p=50..90/10}% of the rooms are "
    "taken, and each of those has 2 guests. How many guests are there?",
    "{name} and {friend} pick {fruit}. {name} picks {a=12..30} an hour and {friend} picks "
    "{b=10..25}. After {h=3..6} hours they eat {e=5..15} and put the rest in bags of {k=5..10}. "
    "How many full bags do they have?",
    "In a {sport} match {name} scored {a=6..20/2} points, {friend} scored half as many plus "
    "{b=2..6}, and the rest of the team scored {c=20..45}. How many points did the team score?",
    "{name}'s phone plan costs ${m=15..30} a month, with {g=2..5} GB included and ${p=4..9} for "
    "every extra GB. What does {she} pay in a month with {u=6..12} GB of use?",
    "A printer prints {a=12..30} pages a minute and a second one prints {b=8..11}. How long do the "
    "two need for {n=400..1200/100} pages if they work at the same time?",
    "{name} drinks {g=5..9} glasses of water a day, and each glass holds {v=200..300/50} ml. How "
    "many litres does {she} drink in {k=2..4} weeks?",
    "A school buys {n=25..60/5} tablets at ${p=120..240/20} each. It gets a discount of "
    "{d=5..20/5}% and a grant of ${g=500..2000/500}. What does the school pay itself?",
    "{name} feeds {her} {k=2..6} dogs {a=2..4} cups of food each a day. A sack has "
    "{s=90..240/30} cups and costs ${p=25..50/5}. What does the food for 60 days cost?",
    "A candle is {h=22..30} cm tall and burns down {r=2..3} cm an hour. {name} lights it at "
    "{t=4..7} pm. How tall is it at 11 pm?",
    "There were {n=30..80} passengers on a bus. At the first stop {a=5..15} got off and "
    "{b=3..12} got on; at the second stop {c=4..10} got off and nobody got on. How many "
    "passengers are on the bus now?",
    "{name} types {w=35..70/5} words a minute. The essay has {n=900..2400/300} words, and {she} "
    "takes a break of {b=5..15} minutes in the middle. How long does typing it take?",
)

EXERCISES = (
    "What is {n=2..60}% of {m=40..900/10}?",
    "What is {a=12..99} times {b=12..99}?",
    "Calculate {100..9999} + {100..9999}.",
    "Calculate {a=1000..9999} - {100..999}.",
    "Divide {a=200..2000} by {b=3..24} and give the remainder.",
    "What is {1..9}/{2..12} + {1..9}/{2..12}?",
    "Multiply the fractions {1..9}/{2..12} and {1..9}/{2..12} and simplify.",
    "Solve for x: {a=2..12}x + {1..40} = {50..150}",
    "Solve {a=2..9}(x - {1..12}) = {10..90}.",
    "If {a=2..9}x - {b=1..20} = {c=10..60}, what is x?",
    "Solve the system: x + y = {20..60}, x - y = {2..18}.",
    "Find the roots of x^2 - {a=5..15}x + {b=4..36} = 0.",
    "Expand ({2..6}x + {1..9})({2..5}x - {1..9}).",
    "Factor x^2 + {a=5..15}x + {4..40}.",
    "What is the greatest common divisor of {24..360} and {18..240}?",
    "What is the least common multiple of {4..30} and {6..40}?",
    "Find the prime factors of {60..2000}.",
    "Is {101..997} a prime number?",
    "What comes next: {a=2..9}, {a*2}, {a*4}, {a*8}, ...?",
    "Find the next two numbers: {a=3..20}, {a+4}, {a+8}, {a+12}, ...",
    "Convert {1..9}.{1..9} kilometres to metres.",
    "How many seconds are there in {2..12} hours and {5..55} minutes?",
    "Convert {3..39}/{40..80/5} to a percentage.",
    "Write 0.{11..99} as a fraction in lowest terms.",
    "What is the average of {10..90}, {10..90}, {10..90} and {10..90}?",
    "Find the median of {3..60}, {3..60}, {3..60}, {3..60} and {3..60}.",
    "Round {100..999}.{100..999} to the nearest tenth.",
    "What is {2..9} squared plus {2..9} cubed?",
    "Evaluate {2..20} + {2..9} * ({10..40} - {2..9}).",
    "Evaluate ({20..90} - {2..18}) / {2..6} + {3..30}.",
    "A circle has radius {2..20} cm. What is its area?",
    "A right triangle has legs {3..15} and {4..20}. How long is the hypotenuse?",
    "What is the area of a triangle with base {4..40} and height {3..30}?",
    "Find the volume of a box {2..12} by {3..15} by {4..20} cm.",
    "Two angles of a triangle are {30..80} and {40..80} degrees. What is the third?",
    "What is the slope of the line through ({1..9}, {2..15}) and ({10..20}, {3..40})?",
    "The ratio of boys to girls is {2..5}:{3..7} and there are {a=60..240/60} children. How many "
    "are girls?",
    "If y is proportional to x and y = {a=6..40/2} when x = {2..8}, find y when x = {9..20}.",
    "A bag has {3..9} red and {4..12} blue balls. What is the probability of drawing a red one?",
    "You roll two dice. What is the probability that the sum is {4..10}?",
    "In how many ways can {4..8} books be arranged on a shelf?",
    "How many different teams of {2..4} can be chosen from {6..12} players?",
    "The function f(x) = {2..9}x^2 - {2..12}x + {1..20}. What is f({2..8})?",
    "Differentiate f(x) = {2..9}x^3 + {2..12}x^2 - {3..15}x.",
    "A number is doubled and then increased by {6..20/2}. The result is {40..98/2}. What is the "
    "number?",
    "The sum of three consecutive whole numbers is {a=30..300/3}. Find them.",
    "What is the sum of all whole numbers from 1 to {20..200}?",
    "Compare {1..9}/{10..15} and {1..9}/{10..15}. Which is larger?",
    "Simplify {2..9}x + {3..12} - {2..8}x + {4..20}.",
    "What is 2 to the power of {4..14}?",
    "Convert {10..250} to binary.",
    "An item costs ${18..90/9} after a {10..40/10}% discount. What was the original price?",
    "Estimate {200..900} x {20..90} by rounding, then find the exact product.",
    "How many minutes are between {1..5}:{10..50} and {6..11}:{10..50}?",
)
