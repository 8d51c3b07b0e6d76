// What the theme leaves out for readers without a mouse or a screen: tables and charts that scroll take the keyboard, a corner of
// a table is no heading, and buttons that copy are no parts of the page to go to.
const mend = () => {
  for (const each of document.querySelectorAll('.md-typeset__scrollwrap, pre > code, p:has(> img[src$=".svg"])')) each.tabIndex = 0;
  for (const each of document.querySelectorAll("th:empty")) each.outerHTML = "<td></td>";
  for (const each of document.querySelectorAll(".md-code__nav")) each.role = "presentation";
};
mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
// On a narrow screen an option stays whole, and other names in code break after the marks in them.
for (const each of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  const parts = each.innerHTML.split(/(\s+)/);
  each.innerHTML = parts.map((part) => part.startsWith("-")
    ? `<span class="option">${part}</span>` : part.length < 14 ? part : part.replace(/[._/=,|](?=[\w&])/g, "$&<wbr>")).join("");
}
// Figures stay on one line; in tables of many columns names do too. Long texts have room beside many columns, or where
// a table scrolls anyway.
const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];
const scrolled = tables.map((table) => Math.max(table.scrollWidth, table.offsetWidth) > document.querySelector("article").clientWidth);
tables.forEach((table, n) => {
  const columns = table.rows[0].cells.length, many = columns > 7;
  for (const cell of table.querySelectorAll("tbody td")) {
    const long = cell.textContent.length >= 40;
    if (many ? !long : /^[-\d.,]+(e[-+]?\d+)?$/.test(cell.textContent)) cell.style.whiteSpace = "nowrap";
    else if (many || long && (columns > 4 || scrolled[n])) cell.style.minWidth = many ? "16rem" : "9rem";
  }
});
