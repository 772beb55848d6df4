-- KEYS: index, descriptions. No ARGV. Expired entries are left to the next announcement: a read writes nothing.
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. integer(now_ms()), '+inf')
local entries = {}
for _, id in ipairs(ids) do
  local description = redis.call('HGET', KEYS[2], id)
  if description then
    entries[#entries + 1] = id
    entries[#entries + 1] = description
  end
end
return {'OK', entries}
