// What the theme leaves out for readers without a mouse or a screen: tables that scroll take the keyboard, a corner of
// a table is no heading, and buttons that copy are no parts of the page to go to.
const mend = () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) each.tabIndex = 0;
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
// In tables of many columns figures and names stay on one line, and remarks have room.
for (const row of document.querySelectorAll(".md-typeset tbody tr"))
  if (row.cells.length > 7)
    for (const cell of row.cells)
      cell.style = cell.textContent.length < 40 ? "white-space: nowrap" : "min-width: 16rem";
